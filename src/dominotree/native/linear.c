/* Linear layers: y = x W^T + b, weights kept in panels of LANES output features, in bf16 where that holds them exactly.
 *
 * Every output is one chain of fused multiply-adds over the input features in their order, whatever shares the
 * tile. A row's result therefore does not depend on how many rows are multiplied together.
 */
#include "common.h"
#include "pass.h"

#define GROUP 8  /* panels a task takes together: a whole number of tiles of every width below */
#define TALL 6   /* rows of the tallest tile */
#define PARALLEL 65536 /* multiplications from which on a second thread pays */
#define BLOCK 48 /* rows whose inputs stay in the cache while all panels pass */

int64_t dt_lanes(void) { return LANES; }

/* weight [out, in] -> panels [ceil(out / LANES), in, LANES], zero beyond `out`. */
void dt_pack(const void *weight, int bf16, int64_t out, int64_t in, void *panels) {
    const size_t size = bf16 ? 2 : 4;
    for (int64_t p = 0; p < out; p += LANES)
        for (int64_t k = 0; k < in; k++)
            for (int64_t j = 0; j < LANES; j++) {
                char *to = (char *)panels + ((p * in + k * LANES) + j) * (int64_t)size;
                if (p + j < out) memcpy(to, (const char *)weight + ((p + j) * in + k) * (int64_t)size, size);
                else memset(to, 0, size);
            }
}

/* Where a pass reads and writes: x [rows, in] in fp32, y [rows, out]. */
typedef struct {
    const float *x;
    void *y;
    int y_bf16;
} Ends;

/* `rows` x `panels` outputs from input features in fp32; both counts are constants where this is used. */
static inline __attribute__((always_inline)) void tile(const Linear *a, const Ends *io, int64_t row, int64_t panel,
                                                       const int rows, const int panels, const int bf16) {
    const int64_t in = a->in, plane = in * LANES;
    const float *x = io->x + row * in;
    const char *w = (const char *)a->panels + panel * plane * (bf16 ? 2 : 4);
    vf sum[TALL * GROUP];
    for (int i = 0; i < rows * panels; i++) sum[i] = (vf){0};
    for (int64_t k = 0; k < in; k++) {
        vf column[GROUP];
        for (int p = 0; p < panels; p++) column[p] = load(w, bf16, p * plane + k * LANES);
        for (int r = 0; r < rows; r++) {
            const vf value = all(x[r * in + k]);
            for (int p = 0; p < panels; p++) sum[r * panels + p] = fused(value, column[p], sum[r * panels + p]);
        }
    }
    for (int p = 0; p < panels; p++) {
        const int64_t from = (panel + p) * LANES, left = a->out - from;
        for (int r = 0; r < rows; r++) {
            vf y = sum[r * panels + p];
            const int64_t to = (row + r) * a->out + from;
            if (left >= LANES) {
                if (a->bias) y += *(const vf *)(a->bias + from);
                store(io->y, io->y_bf16, to, y);
            } else {
                for (int64_t j = 0; j < left; j++)
                    put(io->y, io->y_bf16, to + j, a->bias ? y[j] + a->bias[from + j] : y[j]);
            }
        }
    }
}

/* Tiles of one height over `count` panels, as wide as the registers allow. */
#define TILES(ROWS, WIDE)                                                                                  \
    static void tiles_##ROWS(const Linear *a, const Ends *io, int64_t row, int64_t panel, int64_t count) { \
        for (; count >= WIDE; panel += WIDE, count -= WIDE) {                                              \
            if (a->bf16) tile(a, io, row, panel, ROWS, WIDE, 1);                                           \
            else tile(a, io, row, panel, ROWS, WIDE, 0);                                                   \
        }                                                                                                  \
        for (; count > 0; panel++, count--) {                                                              \
            if (a->bf16) tile(a, io, row, panel, ROWS, 1, 1);                                              \
            else tile(a, io, row, panel, ROWS, 1, 0);                                                      \
        }                                                                                                  \
    }
#if defined(__AVX512F__) || defined(__aarch64__) /* 32 vector registers */
TILES(1, 8)
TILES(2, 8)
TILES(3, 4)
TILES(4, 4)
TILES(5, 4)
TILES(6, 4)
#else /* 16 */
TILES(1, 8)
TILES(2, 4)
TILES(3, 4)
TILES(4, 2)
TILES(5, 2)
TILES(6, 2)
#endif

static void (*const tiles[])(const Linear *, const Ends *, int64_t, int64_t, int64_t) = {
    0, tiles_1, tiles_2, tiles_3, tiles_4, tiles_5, tiles_6};

/* y [rows, out] = x [rows, in] W^T + b, x and y both bf16 or both fp32. Returns 0, or 1 when memory ran out. */
int dt_linear(const Linear *a, const void *x, void *y, int bf16, int64_t rows, int threads) {
    float *wide = 0;
    if (bf16) {
        wide = malloc((size_t)(rows * a->in) * 4 + 64);
        if (!wide) return 1;
        for (int64_t i = 0; i < rows * a->in; i++) wide[i] = widen(((const uint16_t *)x)[i]);
    }
    const Ends io = {wide ? wide : x, y, bf16};
    const int64_t panels = (a->out + LANES - 1) / LANES, groups = (panels + GROUP - 1) / GROUP;
    for (int64_t first = 0; first < rows; first += BLOCK) {
        const int64_t block = rows - first < BLOCK ? rows - first : BLOCK, heights = (block + TALL - 1) / TALL;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) num_threads(threads) if (block * a->in * a->out > PARALLEL)
#endif
        for (int64_t g = 0; g < groups; g++) {
            const int64_t panel = g * GROUP, count = panels - panel < GROUP ? panels - panel : GROUP;
            for (int64_t t = 0; t < heights; t++) { /* heights that differ by one at most: 9 rows are 5 and 4 */
                const int64_t from = block * t / heights, to = block * (t + 1) / heights;
                tiles[to - from](a, &io, first + from, panel, count);
            }
        }
    }
    free(wide);
    return 0;
}
