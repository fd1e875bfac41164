/* Attention over a slot KV cache, with sums taken in the order of absolute positions.
 *
 * Every floating-point chain below runs over one fixed axis in one fixed order: scores over the head
 * dimension, the softmax denominator in LANES lanes by (position mod LANES), the weighted sum over positions.
 * Blocking only chooses which chains run side by side. A row's result therefore does not depend on the rows
 * that share the pass, on the shape of the tree, or on whether an ancestor lies in the tree's tail or, one
 * round later, in the committed prefix.
 */
#include "common.h"
#include "pass.h"

#define QUADS 4   /* queries that run side by side */
#if LANES == 16 || defined(__aarch64__)
#define PAIR 2
#define WIDE 4
#else
#define PAIR 2
#define WIDE 2
#endif
#define SPAN 64   /* positions of values converted at a time */
#define PARALLEL 16384 /* values from which on a second thread pays */

#if defined(__AVX2__)
static inline __m256 eight(const void *p, int bf16, int64_t i) {
    if (!bf16) return _mm256_loadu_ps((const float *)p + i);
    const __m128i h = _mm_loadu_si128((const __m128i *)((const uint16_t *)p + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* in[8, stride] -> out[8, LANES] */
static inline void transpose_8(const void *in, int bf16, int64_t from, int64_t stride, float *out) {
    __m256 x[8], y[8];
    for (int i = 0; i < 8; i++) x[i] = eight(in, bf16, from + i * stride);
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
        x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
        x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
        x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + i * LANES, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * LANES, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
}
#endif

#if defined(__AVX512F__)
/* in[16, stride] in bf16 -> out[32, 16]: pairs of values are moved as one, then parted */
static inline void transpose_pairs(const uint16_t *in, int64_t stride, float *out) {
    __m512i x[16], y[16];
    for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(in + i * stride);
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) /* x[i + j]: in every quarter column j of its four, of rows i to i + 3 */
        for (int j = 0; j < 4; j += 2) {
            x[i + j] = _mm512_unpacklo_epi64(y[i + j / 2], y[i + j / 2 + 2]);
            x[i + j + 1] = _mm512_unpackhi_epi64(y[i + j / 2], y[i + j / 2 + 2]);
        }
    for (int j = 0; j < 4; j++) {
        const __m512i a = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), b = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
        y[j] = _mm512_shuffle_i32x4(a, c, 0x88);
        y[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
        y[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
        y[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; i++) {
        _mm512_storeu_si512(out + 2 * i * LANES, _mm512_slli_epi32(y[i], 16));
        _mm512_storeu_si512(out + (2 * i + 1) * LANES, _mm512_and_si512(y[i], _mm512_set1_epi32((int)0xffff0000)));
    }
}
#endif

/* keys[columns, head_dim] -> block[head_dim][LANES], zero beyond `valid` columns */
static void transpose_keys(const void *keys, int bf16, int64_t head_dim, int64_t valid, float *block) {
    int64_t done = 0;
#if defined(__AVX512F__)
    for (; bf16 && valid == LANES && done + 32 <= head_dim; done += 32)
        transpose_pairs((const uint16_t *)keys + done, head_dim, block + done * LANES);
#endif
#if defined(__AVX2__)
    for (; valid == LANES && done + 8 <= head_dim; done += 8)
        for (int c = 0; c < LANES; c += 8)
            transpose_8(keys, bf16, c * head_dim + done, head_dim, block + done * LANES + c);
#endif
    for (int64_t c = 0; c < LANES; c++)
        for (int64_t d = done; d < head_dim; d++)
            block[d * LANES + c] = c < valid ? get(keys, bf16, c * head_dim + d) : 0.0f;
}

static void widen_row(const void *row, int bf16, int64_t head_dim, int64_t padded, float *out) {
    int64_t d = 0;
    if (bf16) {
        const uint16_t *h = row;
        for (; d + LANES <= head_dim; d += LANES) {
            vf x = load_bf16(h + d);
            memcpy(out + d, &x, sizeof x);
        }
        for (; d < head_dim; d++) out[d] = widen(h[d]);
    } else {
        memcpy(out, row, (size_t)head_dim * 4);
        d = head_dim;
    }
    for (; d < padded; d++) out[d] = 0.0f;
}

/* acc[i][0:padded] += weight[i][p] * values[p][0:padded] for p in [0, count), `queries` rows side by side */
#define WEIGHTED(N)                                                                                               \
    static void weighted_##N(float *acc, int64_t acc_stride, const float *weight, int64_t w_stride,               \
                             const float *values, int64_t padded, int64_t count) {                                \
        int64_t d = 0;                                                                                            \
        for (; d + WIDE * LANES <= padded; d += WIDE * LANES) {                                                   \
            vf a[N][WIDE];                                                                                        \
            for (int i = 0; i < N; i++)                                                                           \
                for (int j = 0; j < WIDE; j++) a[i][j] = *(vf *)(acc + i * acc_stride + d + j * LANES);           \
            for (int64_t p = 0; p < count; p++) {                                                                 \
                vf v[WIDE];                                                                                       \
                for (int j = 0; j < WIDE; j++) v[j] = *(const vf *)(values + p * padded + d + j * LANES);         \
                for (int i = 0; i < N; i++)                                                                       \
                    for (int j = 0; j < WIDE; j++) a[i][j] = fused(all(weight[i * w_stride + p]), v[j], a[i][j]); \
            }                                                                                                     \
            for (int i = 0; i < N; i++)                                                                           \
                for (int j = 0; j < WIDE; j++) *(vf *)(acc + i * acc_stride + d + j * LANES) = a[i][j];           \
        }                                                                                                         \
        for (; d < padded; d += LANES)                                                                            \
            for (int i = 0; i < N; i++) {                                                                         \
                vf a = *(vf *)(acc + i * acc_stride + d);                                                         \
                for (int64_t p = 0; p < count; p++)                                                               \
                    a = fused(all(weight[i * w_stride + p]), *(const vf *)(values + p * padded + d), a);          \
                *(vf *)(acc + i * acc_stride + d) = a;                                                            \
            }                                                                                                     \
    }
WEIGHTED(1)
WEIGHTED(4)

static int64_t needed_columns(const Attention *a, int64_t row) {
    int64_t need = a->contiguous[row];
    for (int64_t t = a->tail_start[row]; t < a->tail_start[row + 1]; t++)
        if (a->tail[t] >= need) need = a->tail[t] + 1;
    return need;
}

/* Rows [first, last) of one slot, the queries that share one KV head. */
static int attend_task(const Attention *a, int64_t first, int64_t last, int64_t kv_head) {
    const int64_t group = a->heads / a->kv_heads, dim = a->head_dim;
    const int64_t padded = (dim + LANES - 1) / LANES * LANES;
    const int64_t queries = (last - first) * group, rounded = (queries + QUADS - 1) / QUADS * QUADS;
    const int64_t plane = (a->slot[first] * a->kv_heads + kv_head) * a->length * dim;
    const size_t width = a->kv_bf16 ? 2 : 4;
    const char *keys = (const char *)a->keys + (size_t)plane * width;
    const char *values = (const char *)a->values + (size_t)plane * width;

    int64_t columns = 0, tails = 0;
    for (int64_t r = first; r < last; r++) {
        int64_t need = needed_columns(a, r), count = a->tail_start[r + 1] - a->tail_start[r];
        if (need > columns) columns = need;
        if (count > tails) tails = count;
    }
    const int64_t stride = (columns + PAIR * LANES - 1) / (PAIR * LANES) * (PAIR * LANES);
    const int64_t tail_stride = (tails + LANES - 1) / LANES * LANES;
    const size_t floats = (size_t)(rounded * dim + rounded * padded + rounded * stride + rounded * tail_stride +
                                   rounded * LANES + PAIR * dim * LANES + SPAN * padded) + 64;
    float *memory = malloc(floats * 4);
    if (!memory) return 1;
    float *q = memory, *acc = q + rounded * dim, *score = acc + rounded * padded;
    float *tail_weight = score + rounded * stride, *lanes = tail_weight + rounded * tail_stride;
    float *block = lanes + rounded * LANES, *span = block + PAIR * dim * LANES;
    memset(q, 0, (size_t)rounded * dim * 4);
    memset(acc, 0, (size_t)rounded * padded * 4);
    memset(lanes, 0, (size_t)rounded * LANES * 4);
    for (int64_t i = 0; i < queries; i++) {
        int64_t source = ((first + i / group) * a->heads + kv_head * group + i % group) * dim;
        for (int64_t d = 0; d < dim; d++) q[i * dim + d] = get(a->q, a->q_bf16, source + d);
    }

    for (int64_t c = 0; c < columns; c += PAIR * LANES) {
        for (int p = 0; p < PAIR; p++) {
            const int64_t from = c + p * LANES, left = columns - from, valid = left < 0 ? 0 : left < LANES ? left : LANES;
            transpose_keys(keys + (size_t)(from * dim) * width, a->kv_bf16, dim, valid, block + p * dim * LANES);
        }
        for (int64_t i = 0; i < rounded; i += QUADS) {
            vf s[QUADS][PAIR] = {{{0}}};
            const float *qi = q + i * dim;
            for (int64_t d = 0; d < dim; d++) {
                vf k[PAIR];
                for (int p = 0; p < PAIR; p++) k[p] = *(const vf *)(block + (p * dim + d) * LANES);
                for (int j = 0; j < QUADS; j++)
                    for (int p = 0; p < PAIR; p++) s[j][p] = fused(all(qi[j * dim + d]), k[p], s[j][p]);
            }
            for (int j = 0; j < QUADS; j++)
                for (int p = 0; p < PAIR; p++)
                    *(vf *)(score + (i + j) * stride + c + p * LANES) = s[j][p] * a->scale;
        }
    }

    for (int64_t i = 0; i < queries; i++) { /* scores -> weights, in place */
        const int64_t row = first + i / group, seen = a->contiguous[row];
        const int64_t *tail = a->tail + a->tail_start[row];
        const int64_t count = a->tail_start[row + 1] - a->tail_start[row];
        float *s = score + i * stride, *t = tail_weight + i * tail_stride, top = -INFINITY;
        vf most = (vf){0} - INFINITY;
        int64_t whole = seen / LANES * LANES;
        for (int64_t c = 0; c < whole; c += LANES) {
            vf x = *(vf *)(s + c);
            vi above = x > most;
            most = (vf)(((vi)x & above) | ((vi)most & ~above));
        }
        for (int j = 0; j < LANES; j++) top = most[j] > top ? most[j] : top;
        for (int64_t c = whole; c < seen; c++) top = s[c] > top ? s[c] : top;
        for (int64_t j = 0; j < count; j++) {
            t[j] = s[tail[j]];
            top = t[j] > top ? t[j] : top;
        }
        vf sum = {0};
        for (int64_t c = 0; c < seen; c += LANES) {
            vf p = exp_nonpositive(*(vf *)(s + c) - top);
            for (int64_t j = seen - c; j < LANES; j++) p[j] = 0.0f;
            sum = sum + p;
            *(vf *)(s + c) = p;
        }
        for (int64_t j = count; j < (count + LANES - 1) / LANES * LANES; j++) t[j] = top;
        for (int64_t j = 0; j < count; j += LANES) *(vf *)(t + j) = exp_nonpositive(*(vf *)(t + j) - top);
        *(vf *)(lanes + i * LANES) = sum;
        for (int64_t j = 0; j < count; j++) lanes[i * LANES + (seen + j) % LANES] += t[j];
    }

    const int direct = !a->kv_bf16 && padded == dim;
    for (int64_t c = 0; c < columns; c += SPAN) {
        const int64_t have = columns - c < SPAN ? columns - c : SPAN;
        const float *value = span;
        if (direct) value = (const float *)values + c * dim;
        else
            for (int64_t p = 0; p < have; p++)
                widen_row(values + (size_t)((c + p) * dim) * width, a->kv_bf16, dim, padded, span + p * padded);
        for (int64_t i = 0; i < queries; i += QUADS) {
            int64_t n = queries - i < QUADS ? queries - i : QUADS, until[QUADS], common = have;
            for (int64_t j = 0; j < n; j++) { /* what lies between queries and rounded only fills the tile */
                until[j] = a->contiguous[first + (i + j) / group] - c;
                if (until[j] > have) until[j] = have;
                if (until[j] < 0) until[j] = 0;
                if (until[j] < common) common = until[j];
            }
            weighted_4(acc + i * padded, padded, score + i * stride + c, stride, value, padded, common);
            for (int64_t j = 0; j < n; j++)
                if (until[j] > common)
                    weighted_1(acc + (i + j) * padded, padded, score + (i + j) * stride + c + common, stride,
                               value + common * padded, padded, until[j] - common);
        }
    }
    for (int64_t i = 0; i < queries; i++) {
        const int64_t row = first + i / group, start = a->tail_start[row];
        for (int64_t j = 0; j < a->tail_start[row + 1] - start; j++) {
            widen_row(values + (size_t)(a->tail[start + j] * dim) * width, a->kv_bf16, dim, padded, span);
            weighted_1(acc + i * padded, padded, tail_weight + i * tail_stride + j, tail_stride, span, padded, 1);
        }
        float total = 0.0f;
        for (int j = 0; j < LANES; j++) total += lanes[i * LANES + j];
        int64_t target = ((first + i / group) * a->heads + kv_head * group + i % group) * dim;
        for (int64_t d = 0; d < dim; d++) put(a->out, a->q_bf16, target + d, acc[i * padded + d] / total);
    }
    free(memory);
    return 0;
}

/* Returns 0, or 1 when memory ran out. Rows of one slot must be adjacent. */
int dt_attend(const Attention *a, int64_t rows, int threads) {
    const int64_t group = a->heads / a->kv_heads;
    const int64_t most = (32 + group - 1) / group; /* about 32 queries a task keep its scores in the cache */
    const int64_t parts = (2 * threads + a->kv_heads - 1) / a->kv_heads; /* a head in, for threads to share evenly */
    int64_t chunk = (rows + parts - 1) / parts;
    if (chunk > most) chunk = most;
    int64_t *bounds = malloc((size_t)(rows + 1) * 8), tasks = 0;
    if (!bounds) return 1;
    for (int64_t r = 0; r < rows;) {
        int64_t end = r + 1;
        while (end < rows && end - r < chunk && a->slot[end] == a->slot[r]) end++;
        bounds[tasks++] = r;
        r = end;
    }
    bounds[tasks] = rows;
    int failed = 0;
#ifdef _OPENMP
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) reduction(| : failed)
#endif
    for (int64_t h = 0; h < a->kv_heads; h++)
        for (int64_t t = 0; t < tasks; t++) failed |= attend_task(a, bounds[t], bounds[t + 1], h);
    free(bounds);
    return failed;
}

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
 * [head_dim] or null, of qkv's dtype; cos, sin [rows, head_dim / 2] fp32; q_out [rows, heads, head_dim]. */
void dt_rope_store(const RopeStore *a, int threads) {
    const int64_t dim = a->head_dim, half = dim / 2, kv_heads = a->kv_heads;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (a->rows * a->stride > PARALLEL)
#endif
    for (int64_t r = 0; r < a->rows; r++) {
        const float *c = a->cos + r * half, *s = a->sin + r * half;
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
