/* Linear layers: y = x W^T + b, weights kept in panels of LANES output features, in bf16 where that holds them exactly, or
 * rounded to int8 with a scale for each output feature.
 *
 * Every output is one chain of sums over the input features in their order, whatever shares the tile. A row's result
 * therefore does not depend on how many rows are multiplied together. In fp32 the chain is of fused multiply-adds; bf16
 * rows times bf16 weights take the processor's own dot products of pairs, in tiles (AMX) or vectors, where it has them; int8
 * weights, which bf16 holds, are widened on the way.
 */
#include "common.h"
#include "pass.h"
#if TILED
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
#define MANY_REGISTERS 1 /* 32 of vectors, not 16 */
#else
#define MANY_REGISTERS 0
#endif
#define TALL (MANY_REGISTERS ? 9 : 5) /* rows of the tallest tile of vectors */
#define PARALLEL 65536 /* multiplications from which on a second thread pays */
#define BLOCK (MANY_REGISTERS ? 48 : 30) /* rows whose inputs stay in the cache while all panels pass */
#define STEP 288 /* input features of a panel, at most, that all heights of a block take before the next ones */
#define SHARE 6 /* panels that a thread takes at a time, as many as the widest tile has: threads are not equally fast */

int64_t dt_lanes(void) { return LANES; }

/* Values between one panel and the next. Those of bf16 and int8 lie in pairs of input features, [ceil(in / 2), LANES, 2]. */
static inline int64_t plane(const Linear *a) { return (a->kept == FP32 ? a->in : a->in + a->in % 2) * LANES; }

static inline int64_t bytes_of(const Linear *a) { return plane(a) * (a->kept == FP32 ? 4 : a->kept == BF16 ? 2 : 1); }

/* weight [count, in], of output features `first` and on, into panels [ceil(out / LANES), in, LANES] or, in pairs,
 * [.., ceil(in / 2), LANES, 2], which are zero elsewhere. */
void dt_pack(const void *weight, int kept, int64_t first, int64_t count, int64_t in, void *panels) {
    const Linear a = {.in = in, .kept = kept};
    for (int64_t o = 0; o < count; o++)
        for (int64_t k = 0; k < in; k++) {
            const int64_t panel = (first + o) / LANES * plane(&a), j = (first + o) % LANES;
            const int64_t pair = panel + k / 2 * 2 * LANES + 2 * j + k % 2;
            if (kept == FP32) ((float *)panels)[panel + k * LANES + j] = ((const float *)weight)[o * in + k];
            else if (kept == BF16) ((uint16_t *)panels)[pair] = ((const uint16_t *)weight)[o * in + k];
            else ((int8_t *)panels)[pair] = ((const int8_t *)weight)[o * in + k];
        }
}

/* Where a pass reads and writes: x [rows, in], in fp32 or as pairs of bf16, y [rows, stride]. */
typedef struct {
    const void *x;
    void *y;
    int y_bf16;
    int64_t stride;
} Ends;

/* Scales LANES sums of one row, adds the bias and writes those that exist. */
static inline void finish(const Linear *a, const Ends *io, int64_t row, int64_t panel, vf y) {
    const int64_t from = panel * LANES, left = a->out - from, to = row * io->stride + from;
    if (left >= LANES) {
        if (a->scale) y *= *(const vf *)(a->scale + from);
        if (a->bias) y += *(const vf *)(a->bias + from);
        store(io->y, io->y_bf16, to, y);
        return;
    }
    for (int64_t j = 0; j < left; j++) {
        const float scaled = a->scale ? y[j] * a->scale[from + j] : y[j];
        put(io->y, io->y_bf16, to + j, a->bias ? scaled + a->bias[from + j] : scaled);
    }
}

/* Weights of input feature k + odd in one panel, k even, as fp32. */
static inline __attribute__((always_inline)) vf column_of(const char *panel, const int kept, int64_t k, const int odd) {
    if (kept == FP32) return *(const vf *)((const float *)panel + (k + odd) * LANES);
    if (kept == INT8) {
        const vu pairs = __builtin_convertvector(*(const vh *)(panel + k * LANES), vu);
        return __builtin_convertvector((vi)(pairs << (odd ? 16 : 24)) >> 24, vf);
    }
    const vu pairs = *(const vu *)((const uint16_t *)panel + k * LANES);
    return odd ? (vf)(pairs & 0xffff0000u) : (vf)(pairs << 16);
}

#ifdef __AVX512BF16__
/* A pair of weights for each of LANES outputs, at input feature k, as bf16. */
static inline __attribute__((always_inline)) __m512bh pairs_of(const char *panel, const int kept, int64_t k) {
    if (kept == BF16) return (__m512bh)_mm512_loadu_si512(panel + k * 2 * LANES);
    const __m128i *from = (const __m128i *)(panel + k * LANES);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
    return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1))), low);
}
#endif

/* What a tile adds to its sums [rows, panels]: the products of input features `from` to `to` of its first row `x` and panel
 * `w`. On the way it fetches what is read later, since memory is what a pass waits for: from `fetch` on in every panel,
 * `pace` bytes with each pair of features. */
typedef struct {
    const void *x;
    const char *w, *fetch;
    int64_t from, to, pace;
    vf *sums;
} Part;

/* The products of input feature k + ODD of fp32 rows, k even. */
#define ADD(ODD)                                                                                                     \
    {                                                                                                                \
        vf column[SHARE];                                                                                            \
        for (int p = 0; p < panels; p++) column[p] = column_of(w + p * bytes, kept, k, ODD);                         \
        for (int r = 0; r < rows; r++) {                                                                             \
            const vf value = all(x[r * in + k + ODD]);                                                               \
            for (int p = 0; p < panels; p++) sum[r * panels + p] = fused(value, column[p], sum[r * panels + p]);     \
        }                                                                                                            \
    }

/* `rows` x `panels` sums of rows in fp32 or, `paired`, bf16; both counts and the types are constants where this is used. */
static inline __attribute__((always_inline)) void tile(const Linear *a, const Part *part, const int rows, const int panels,
                                                       const int paired, const int kept) {
    const int64_t in = a->in, bytes = bytes_of(a), to = part->to, pace = part->pace;
    const char *w = part->w, *fetch = part->fetch;
    vf sum[TALL * SHARE]; /* of constant size, else none is kept in registers */
    for (int i = 0; i < rows * panels; i++) sum[i] = part->sums[i];
#ifdef __AVX512BF16__
    if (paired) {
        const int32_t *x = part->x;
        for (int64_t k = part->from / 2; k < to / 2; k++, fetch += pace) {
            __m512bh column[SHARE];
            for (int p = 0; p < panels; p++) {
                __builtin_prefetch(fetch + p * bytes);
                column[p] = pairs_of(w + p * bytes, kept, 2 * k);
            }
            for (int r = 0; r < rows; r++) {
                const __m512bh value = (__m512bh)_mm512_set1_epi32(x[r * (in / 2) + k]);
                for (int p = 0; p < panels; p++)
                    sum[r * panels + p] = (vf)_mm512_dpbf16_ps((__m512)sum[r * panels + p], value, column[p]);
            }
        }
    } else
#endif
    {
        const float *x = part->x;
        int64_t k = part->from;
        for (; k + 1 < to; k += 2, fetch += pace) {
            for (int p = 0; p < panels; p++) __builtin_prefetch(fetch + p * bytes);
            ADD(0)
            __asm__ volatile("" : "+r"(w), "+r"(x)); /* else compilers load more at a time than there are registers for */
            ADD(1)
            __asm__ volatile("" : "+r"(w), "+r"(x));
        }
        if (k < to) ADD(0)
    }
    for (int i = 0; i < rows * panels; i++) part->sums[i] = sum[i];
}

#define TILE(ROWS, PANELS)                                                              \
    static void tile_##ROWS##x##PANELS(const Linear *a, const Part *part, int paired) { \
        if (paired && a->kept == BF16) tile(a, part, ROWS, PANELS, 1, BF16);            \
        else if (paired) tile(a, part, ROWS, PANELS, 1, INT8);                          \
        else if (a->kept == BF16) tile(a, part, ROWS, PANELS, 0, BF16);                 \
        else if (a->kept == INT8) tile(a, part, ROWS, PANELS, 0, INT8);                 \
        else tile(a, part, ROWS, PANELS, 0, FP32);                                      \
    }
TILE(1, 1)
TILE(1, 6)
TILE(2, 1)
TILE(3, 1)
TILE(4, 1)
TILE(5, 1)
#if MANY_REGISTERS
TILE(2, 6)
TILE(3, 6)
TILE(4, 3)
TILE(5, 3)
TILE(6, 1)
TILE(6, 3)
TILE(7, 1)
TILE(7, 3)
TILE(8, 1)
TILE(8, 2)
TILE(8, 3)
TILE(9, 1)
TILE(9, 2)
#else
TILE(2, 3)
TILE(3, 2)
TILE(4, 2)
TILE(5, 2)
#endif

/* Panels side by side of the tallest tiles of a block: enough that sums do not wait for one another, and no more than there
 * are registers for. A block's other tiles, of one row less, are as wide. */
#if MANY_REGISTERS
static const int widths[] = {0, 6, 6, 6, 3, 3, 3, 3, 3, 2};
#else
static const int widths[] = {0, 6, 3, 2, 2, 2};
#endif

static void (*const tiles[TALL + 1][SHARE + 1])(const Linear *, const Part *, int) = {
    [1] = {[1] = tile_1x1, [6] = tile_1x6},
#if MANY_REGISTERS
    [2] = {[1] = tile_2x1, [6] = tile_2x6},
    [3] = {[1] = tile_3x1, [6] = tile_3x6},
    [4] = {[1] = tile_4x1, [3] = tile_4x3},
    [5] = {[1] = tile_5x1, [3] = tile_5x3},
    [6] = {[1] = tile_6x1, [3] = tile_6x3},
    [7] = {[1] = tile_7x1, [3] = tile_7x3},
    [8] = {[1] = tile_8x1, [2] = tile_8x2, [3] = tile_8x3},
    [9] = {[1] = tile_9x1, [2] = tile_9x2},
#else
    [2] = {[1] = tile_2x1, [3] = tile_2x3},
    [3] = {[1] = tile_3x1, [2] = tile_3x2},
    [4] = {[1] = tile_4x1, [2] = tile_4x2},
    [5] = {[1] = tile_5x1, [2] = tile_5x2},
#endif
};

/* `rows` of a block times `count` panels, SHARE at most. All heights take STEP features of some panels, then the next: so
 * memory is asked for weights all the time, not only while the first height passes. */
static void vectors(const Linear *a, const Ends *io, int64_t first, int64_t rows, int64_t panel, int64_t count, int paired) {
    const int64_t heights = (rows + TALL - 1) / TALL, wide = widths[(rows + heights - 1) / heights], bytes = bytes_of(a);
    const int64_t pair = 2 * LANES * (a->kept == FP32 ? 4 : a->kept == BF16 ? 2 : 1), row_bytes = a->in * (paired ? 2 : 4);
    const int64_t parts = (a->in + STEP - 1) / STEP, step = (a->in / parts + 1) / 2 * 2; /* even, and alike */
    const char *x = (const char *)io->x + first * row_bytes;
    vf sums[3 * BLOCK];
    for (int64_t panels; count > 0; panel += panels, count -= panels) {
        panels = count >= wide ? wide : 1;
        const char *w = (const char *)a->panels + panel * bytes;
        for (int64_t i = 0; i < rows * panels; i++) sums[i] = (vf){0};
        for (int64_t k = 0; k < a->in; k += step) {
            const int64_t to = k + step < a->in ? k + step : a->in;
            const char *next = to < a->in ? w + to / 2 * pair : w + panels * bytes;
            for (int64_t t = 0; t < heights; t++) { /* heights that differ by one at most: 17 rows are 8 and 9 */
                const int64_t from = rows * t / heights, high = rows * (t + 1) / heights - from;
                const Part part = {
                    .x = x + from * row_bytes, .w = w, .fetch = next + step / 2 * pair * t / heights, .from = k, .to = to,
                    .pace = pair / heights, .sums = sums + from * panels,
                };
                tiles[high][panels](a, &part, paired);
            }
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t p = 0; p < panels; p++) finish(a, io, first + r, panel + p, sums[r * panels + p]);
    }
}

#if TILED
#define DEPTH 32 /* input features that one instruction adds */
#define AHEAD 4096 /* bytes of a panel between what is multiplied and what is fetched */
#define STACK 5  /* tiles of sums, one above the other */

/* The weights of input features k to k + DEPTH - 1 of a panel as bf16: themselves, or widened into `wide`. */
static inline __attribute__((always_inline)) const void *weights_of(const char *w, int kept, int64_t k, uint16_t *wide) {
    if (kept == BF16) {
        const char *step = w + k * 2 * LANES;
        for (int line = 0; line < SIDE; line++) __builtin_prefetch(step + AHEAD + 64 * line);
        return step;
    }
    for (int line = 0; line < SIDE / 2; line++) __builtin_prefetch(w + k * LANES + AHEAD + 64 * line);
    for (int64_t i = 0; i < DEPTH; i += 2) _mm512_store_si512(wide + i * LANES, (__m512i)pairs_of(w, INT8, k + i));
    __asm__ volatile("" ::: "memory"); /* compilers do not know all that tiles read */
    return wide;
}

/* Tiles 0 to 4 hold sums, 5 the inputs of the last, perhaps lower, stack of rows, 6 weights, 7 the other inputs. */
#define UPPER(N)                                          \
    _tile_loadd(7, x + (N) * SIDE * in + k, (size_t)in * 2); \
    _tile_dpbf16ps(N, 7, 6);
#define LOWEST(N)                                         \
    _tile_loadd(5, x + (N) * SIDE * in + k, (size_t)in * 2); \
    _tile_dpbf16ps(N, 5, 6);
#define EACH_1(DO) DO(0)
#define EACH_2(DO) EACH_1(DO) DO(1)
#define EACH_3(DO) EACH_2(DO) DO(2)
#define EACH_4(DO) EACH_3(DO) DO(3)
#define EACH_5(DO) EACH_4(DO) DO(4)
#define CLEAR(N) _tile_zero(N);
#define KEEP(N) _tile_stored(N, sums + (N) * SIDE * LANES, 64);
#define NONE
#define STACKED(R, LAST, ABOVE)                                                                      \
    static void stacked_##R(const uint16_t *x, const char *w, int kept, int64_t in, float *sums) {   \
        uint16_t wide[2 * DEPTH * LANES] __attribute__((aligned(64))); /* two steps, taken in turn */ \
        EACH_##R(CLEAR)                                                                              \
        for (int64_t k = 0; k < in; k += DEPTH) {                                                    \
            const void *step = weights_of(w, kept, k, wide + k / DEPTH % 2 * DEPTH * LANES);         \
            _tile_loadd(6, step, 64);                                                                \
            ABOVE LOWEST(LAST)                                                                       \
        }                                                                                            \
        EACH_##R(KEEP)                                                                               \
    }
STACKED(1, 0, NONE)
STACKED(2, 1, EACH_1(UPPER))
STACKED(3, 2, EACH_2(UPPER))
STACKED(4, 3, EACH_3(UPPER))
STACKED(5, 4, EACH_4(UPPER))

static void (*const stacked[])(const uint16_t *, const char *, int, int64_t, float *) = {
    0, stacked_1, stacked_2, stacked_3, stacked_4, stacked_5};

/* Panels side by side, so that inputs are loaded less often and memory is asked for several things at once. Sums go to
 * sums[panel, stack, SIDE, LANES]. Of one stack of rows three panels: tiles 0 to 2 hold sums, 5 inputs, 4, 6, 7 weights. */
static void three_panels(const uint16_t *x, const char *w, int64_t next, int kept, int64_t in, float *sums) {
    uint16_t wide[6 * DEPTH * LANES] __attribute__((aligned(64)));
    CLEAR(0) CLEAR(1) CLEAR(2)
    for (int64_t k = 0; k < in; k += DEPTH) {
        uint16_t *room = wide + k / DEPTH % 2 * 3 * DEPTH * LANES;
        const void *one = weights_of(w, kept, k, room), *two = weights_of(w + next, kept, k, room + DEPTH * LANES);
        const void *three = weights_of(w + 2 * next, kept, k, room + 2 * DEPTH * LANES);
        _tile_loadd(5, x + k, (size_t)in * 2);
        _tile_loadd(6, one, 64);
        _tile_loadd(7, two, 64);
        _tile_loadd(4, three, 64);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        _tile_dpbf16ps(2, 5, 4);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + SIDE * LANES, 64);
    _tile_stored(2, sums + 2 * SIDE * LANES, 64);
}

/* Of two stacks two: tiles 0 and 1 hold sums of the last stack, 2 and 3 of the first, 5 and 4 their inputs, 6, 7 weights. */
static void two_panels(const uint16_t *x, const char *w, int64_t next, int kept, int64_t in, float *sums) {
    uint16_t wide[4 * DEPTH * LANES] __attribute__((aligned(64)));
    CLEAR(0) CLEAR(1) CLEAR(2) CLEAR(3)
    for (int64_t k = 0; k < in; k += DEPTH) {
        uint16_t *room = wide + k / DEPTH % 2 * 2 * DEPTH * LANES;
        const void *one = weights_of(w, kept, k, room), *two = weights_of(w + next, kept, k, room + DEPTH * LANES);
        _tile_loadd(6, one, 64);
        _tile_loadd(7, two, 64);
        _tile_loadd(5, x + SIDE * in + k, (size_t)in * 2);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(4, x + k, (size_t)in * 2);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(2, sums, 64);
    _tile_stored(0, sums + SIDE * LANES, 64);
    _tile_stored(3, sums + 2 * SIDE * LANES, 64);
    _tile_stored(1, sums + 3 * SIDE * LANES, 64);
}

static void matrices(const Linear *a, const Ends *io, int64_t first, int64_t rows, int64_t panel, int64_t count) {
    const int64_t stacks = (rows + SIDE - 1) / SIDE, end = panel + count, beside = stacks == 1 ? 3 : stacks == 2 ? 2 : 0;
    const uint8_t left = (uint8_t)(rows - (stacks - 1) * SIDE);
    const uint16_t *x = (const uint16_t *)io->x + first * a->in;
    float sums[STACK * SIDE * LANES] __attribute__((aligned(64)));
    if (beside && count >= beside) {
        Tiles shape = whole_tiles();
        shape.rows[0] = shape.rows[1] = shape.rows[5] = left;
        if (stacks == 1) shape.rows[2] = left;
        use_tiles(&shape);
        for (; panel + beside <= end; panel += beside) {
            const char *w = (const char *)a->panels + panel * bytes_of(a);
            (stacks == 1 ? three_panels : two_panels)(x, w, bytes_of(a), a->kept, a->in, sums);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t p = 0; p < beside; p++)
                    finish(a, io, first + r, panel + p, *(const vf *)(sums + (p * stacks * SIDE + r) * LANES));
        }
    }
    if (panel < end) {
        Tiles shape = whole_tiles();
        shape.rows[5] = shape.rows[stacks - 1] = left;
        use_tiles(&shape);
    }
    for (; panel < end; panel++) {
        stacked[stacks](x, (const char *)a->panels + panel * bytes_of(a), a->kept, a->in, sums);
        for (int64_t r = 0; r < rows; r++) finish(a, io, first + r, panel, *(const vf *)(sums + r * LANES));
    }
    _tile_release();
}
#endif

/* How bf16 rows are multiplied: 0 widened to fp32, 1 as vectors of pairs, 2 in tiles. */
int dt_bf16(void) {
#if TILED
    static int allowed = -1;
    if (allowed < 0) allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0; /* the kernel's leave to use tiles */
    if (allowed) return 2;
#endif
#ifdef __AVX512BF16__
    return 1;
#endif
    return 0;
}

/* y [rows, stride], of which the first `out`, = x [rows, in] W^T + b, x and y both bf16 or both fp32. Returns 0, or 1 when
 * memory ran out. */
int dt_linear(const Linear *a, const void *x, void *y, int bf16, int64_t rows, int64_t stride, int threads) {
    const int paired = bf16 && a->kept != FP32 && a->in % 2 == 0 ? dt_bf16() : 0;
    float *wide = 0;
    if (bf16 && !paired) {
        wide = malloc((size_t)(rows * a->in) * 4 + 64);
        if (!wide) return 1;
        for (int64_t i = 0; i < rows * a->in; i++) wide[i] = widen(((const uint16_t *)x)[i]);
    }
    const Ends io = {wide ? wide : x, y, bf16, stride};
    int64_t panels = (a->out + LANES - 1) / LANES, most = BLOCK;
#if TILED
    const int tiled = paired == 2 && a->in % DEPTH == 0;
    if (tiled) most = STACK * SIDE;
#endif
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (rows * a->in * a->out > PARALLEL)
#endif
    for (int64_t first = 0; first < rows; first += most) {
        const int64_t block = rows - first < most ? rows - first : most;
#ifdef _OPENMP
#pragma omp for schedule(dynamic) nowait
#endif
        for (int64_t from = 0; from < panels; from += SHARE) {
            const int64_t count = panels - from < SHARE ? panels - from : SHARE;
#if TILED
            if (tiled) matrices(a, &io, first, block, from, count);
            else
#endif
                vectors(a, &io, first, block, from, count, paired != 0);
        }
    }
    free(wide);
    return 0;
}
