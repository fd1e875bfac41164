/* What happens between the matrix products of a pass, row by row. */
#include "common.h"
#include "pass.h"

#define PARALLEL 16384 /* values from which on a second thread pays */

/* out = x / sqrt(mean(x^2) + eps) * weight over one row of `dim` values read from `x` and `delta` (may be null);
 * the sum x + delta, rounded to the dtype, is written back to `x`. */
static void norm_row(void *x, const void *delta, const void *weight, void *out, int bf16, int64_t from, int64_t to,
                     int64_t dim, float eps) {
    vf squares = {0};
    float rest = 0.0f;
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        vf v = load(x, bf16, from + d);
        if (delta) {
            store(x, bf16, from + d, v + load(delta, bf16, from + d));
            v = load(x, bf16, from + d);
        }
        squares = fused(v, v, squares);
    }
    for (; d < dim; d++) {
        if (delta) put(x, bf16, from + d, get(x, bf16, from + d) + get(delta, bf16, from + d));
        float v = get(x, bf16, from + d);
        rest = v * v + rest;
    }
    const float scale = 1.0f / sqrtf((sum_lanes(squares) + rest) / (float)dim + eps);
    for (d = 0; d + LANES <= dim; d += LANES)
        store(out, bf16, to + d, load(x, bf16, from + d) * scale * load(weight, bf16, d));
    for (; d < dim; d++) put(out, bf16, to + d, get(x, bf16, from + d) * scale * get(weight, bf16, d));
}

/* x [rows, dim] += delta (null: nothing), out [rows, dim] = rms norm of it times weight [dim]; all of one dtype. */
void dt_add_norm(void *x, const void *delta, const void *weight, void *out, int bf16, int64_t rows, int64_t dim,
                 float eps, int threads) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (rows * dim > PARALLEL)
#endif
    for (int64_t r = 0; r < rows; r++) norm_row(x, delta, weight, out, bf16, r * dim, r * dim, dim, eps);
}

/* out [rows, dim] = silu(gate) * up for gate_up [rows, 2 * dim]. */
void dt_swiglu(const void *gate_up, void *out, int bf16, int64_t rows, int64_t dim, int threads) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (4 * rows * dim > PARALLEL) /* exp costs more than loading */
#endif
    for (int64_t r = 0; r < rows; r++) {
        const int64_t gate = 2 * r * dim, up = gate + dim;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            vf g = load(gate_up, bf16, gate + d);
            vi negative = g < 0.0f;
            vf size = (vf)((vi)g & 0x7fffffff);
            vf e = exp_nonpositive(-size);
            vf top = (vf)(((vi)e & negative) | ((vi)(e * 0.0f + 1.0f) & ~negative)); /* sigmoid = top / (1 + e) */
            store(out, bf16, r * dim + d, g * (top / (1.0f + e)) * load(gate_up, bf16, up + d));
        }
        for (; d < dim; d++) {
            float g = get(gate_up, bf16, gate + d), e = expf(-fabsf(g));
            put(out, bf16, r * dim + d, g * ((g < 0 ? e : 1.0f) / (1.0f + e)) * get(gate_up, bf16, up + d));
        }
    }
}

/* index[r] = first place of the largest of row r, or -1 where the row holds a NaN. */
void dt_argmax(const void *values, int bf16, int64_t rows, int64_t width, int64_t *index, int threads) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (rows * width > PARALLEL)
#endif
    for (int64_t r = 0; r < rows; r++) {
        const int64_t from = r * width;
        vf most = (vf){0} - INFINITY;
        vi bad = {0};
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES) {
            vf x = load(values, bf16, from + c);
            vi above = x > most;
            bad |= x != x;
            most = (vf)(((vi)x & above) | ((vi)most & ~above));
        }
        float top = -INFINITY;
        int nan = 0;
        for (int j = 0; j < LANES; j++) {
            top = most[j] > top ? most[j] : top;
            nan |= bad[j];
        }
        for (int64_t t = c; t < width; t++) {
            float x = get(values, bf16, from + t);
            nan |= x != x;
            top = x > top ? x : top;
        }
        int64_t place = 0;
        while (place < width && get(values, bf16, from + place) != top) place++;
        index[r] = nan ? -1 : place == width ? 0 : place;
    }
}

/* Norms (optional) and rotates queries and keys (half-split RoPE), writes keys and values into the cache at
 * (slot, column). qkv [rows, stride], of which the first (heads + 2 kv_heads) * head_dim are read; q_norm, k_norm
 * [head_dim] or null, of qkv's dtype; q_out [rows, heads, head_dim]. Without heads, keys and values only. */
void dt_rope_store(const RopeStore *a, int threads) {
    const int64_t dim = a->head_dim, half = dim / 2, kv_heads = a->kv_heads;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (a->rows * a->stride > PARALLEL)
#endif
    for (int64_t r = 0; r < a->rows; r++) {
        const float *c = a->cos + a->position[r] * half, *s = a->sin + a->position[r] * half;
        for (int64_t h = 0; h < a->heads + 2 * kv_heads; h++) {
            const int64_t from = r * a->stride + h * dim;
            const int is_q = h < a->heads, is_v = h >= a->heads + kv_heads;
            const int64_t kv = h - a->heads - (is_v ? kv_heads : 0);
            const int64_t to = is_q ? (r * a->heads + h) * dim
                                    : ((a->slot[r] * kv_heads + kv) * a->length + a->column[r]) * dim;
            void *dst = is_q ? a->q_out : is_v ? a->values : a->keys;
            const int bf16 = a->bf16, dst_bf16 = is_q ? bf16 : a->kv_bf16;
            const void *norm = is_q ? a->q_norm : is_v ? 0 : a->k_norm;
            if (norm) norm_row(a->qkv, 0, norm, a->qkv, bf16, from, from, dim, a->eps);
            int64_t d = 0;
            if (is_v) {
                for (; d + LANES <= dim; d += LANES) store(dst, dst_bf16, to + d, load(a->qkv, bf16, from + d));
                for (; d < dim; d++) put(dst, dst_bf16, to + d, get(a->qkv, bf16, from + d));
            } else {
                for (; d + LANES <= half; d += LANES) {
                    const vf x = load(a->qkv, bf16, from + d), y = load(a->qkv, bf16, from + half + d);
                    const vf cos = load(c, 0, d), sin = load(s, 0, d);
                    store(dst, dst_bf16, to + d, fused(x, cos, -(y * sin)));
                    store(dst, dst_bf16, to + half + d, fused(y, cos, x * sin));
                }
                for (; d < half; d++) {
                    float x = get(a->qkv, bf16, from + d), y = get(a->qkv, bf16, from + half + d);
                    put(dst, dst_bf16, to + d, x * c[d] - y * s[d]);
                    put(dst, dst_bf16, to + half + d, y * c[d] + x * s[d]);
                }
            }
        }
    }
}

/* Copies column from[i] to column to[i] <= from[i], both increasing, of one slot: `layers` stretches, `stride` bytes apart,
 * of kv_heads times `length` columns of `row` bytes. */
void dt_move(void *slot, int64_t layers, int64_t stride, int64_t kv_heads, int64_t length, int64_t row, const int64_t *to,
             const int64_t *from, int64_t count) {
    for (int64_t l = 0; l < layers; l++)
        for (int64_t h = 0; h < kv_heads; h++) {
            char *columns = (char *)slot + l * stride + h * length * row;
            for (int64_t i = 0; i < count; i++)
                if (to[i] != from[i]) memcpy(columns + to[i] * row, columns + from[i] * row, (size_t)row);
        }
}
