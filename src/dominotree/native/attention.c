/* Attention over a slot KV cache, with sums taken in the order of absolute positions.
 *
 * Queries lie in the lanes of vectors. Every floating-point chain below belongs to one query and runs over one fixed
 * axis in one fixed order: a score over the head dimension, the softmax denominator and the weighted sum over columns,
 * that is over positions. A column that a query does not see adds exact zeros to it. A row's result therefore does not
 * depend on the rows that share the pass, on the shape of the tree, or on whether an ancestor lies in the tree's tail
 * or, one round later, in the committed prefix.
 */
#include "common.h"
#include "pass.h"

#define KEYS 8     /* keys whose scores are summed side by side without tiles */
#define QUADS 4    /* queries whose weighted sums run side by side */
#define SPAN 64    /* columns of values converted at a time */
#define QUERIES 32 /* of a task: its scores stay in the cache */
#define AHEAD 2048 /* bytes of keys or values between what is read and what is fetched */
#if LANES == 16 || defined(__aarch64__)
#define WIDE 4     /* vectors of values that are summed side by side */
#else
#define WIDE 2
#endif

/* The queries of one KV head over some rows of one slot, `lanes` of them with what fills the last vector. */
typedef struct {
    int64_t first, last, group, count, lanes, dim, padded;
    int64_t columns, common; /* seen by any, seen by all without a look at the tail */
    const char *keys, *values;
    void *query;  /* [dim, lanes] fp32; for tiles [lanes / SIDE, dim / 2, SIDE, 2] bf16 */
    float *score; /* [columns rounded up to SIDE, lanes]: scores, then weights */
    int32_t *seen; /* [columns - common, lanes] all ones where a query sees a column, else 0 */
    float *total; /* [lanes] */
    float *sum;   /* [lanes, padded] */
    float *span;  /* [SPAN, padded] */
} Task;

static inline void fetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

static int tiled(const Attention *a) {
#if TILED
    return a->q_bf16 && a->kv_bf16 && a->head_dim % 32 == 0 && a->head_dim <= 128 && dt_bf16() == 2;
#else
    (void)a;
    return 0;
#endif
}

/* Queries into lanes. */
static void gather(const Attention *a, const Task *t, int64_t kv_head, int pairs) {
    for (int64_t i = 0; i < t->count; i++) {
        const int64_t from = ((t->first + i / t->group) * a->heads + kv_head * t->group + i % t->group) * t->dim;
        if (pairs) {
            const uint16_t *q = (const uint16_t *)a->q + from;
            uint16_t *to = (uint16_t *)t->query + i / SIDE * SIDE * t->dim + i % SIDE * 2;
            for (int64_t d = 0; d < t->dim; d += 2) memcpy(to + d * SIDE, q + d, 4);
        } else {
            for (int64_t d = 0; d < t->dim; d++) ((float *)t->query)[d * t->lanes + i] = get(a->q, a->q_bf16, from + d);
        }
    }
}

#if TILED
#define ADD(KEYS_TILE, QUERY_TILE, FROM)                      \
    {                                                         \
        _tile_loadd(KEYS_TILE, keys + (FROM), (size_t)row);   \
        _tile_dpbf16ps(0, KEYS_TILE, QUERY_TILE);             \
    }

static void tile_scores(const Task *t) {
    const Tiles shape = whole_tiles();
    use_tiles(&shape);
    const int64_t row = t->dim * 2;
    for (int64_t i = 0; i < t->lanes; i += SIDE) {
        const char *query = (const char *)t->query + i * row;
        _tile_loadd(4, query, 64);
        if (t->dim > 32) _tile_loadd(5, query + 64 * SIDE, 64);
        if (t->dim > 64) _tile_loadd(6, query + 128 * SIDE, 64);
        if (t->dim > 96) _tile_loadd(7, query + 192 * SIDE, 64);
        for (int64_t c = 0; c < t->columns; c += SIDE) {
            const char *keys = t->keys + c * row;
            if (!i) fetch(keys + AHEAD, SIDE * row);
            _tile_zero(0);
            ADD(1, 4, 0)
            if (t->dim > 32) ADD(2, 5, 64)
            if (t->dim > 64) ADD(3, 6, 128)
            if (t->dim > 96) ADD(1, 7, 192)
            _tile_stored(0, t->score + c * t->lanes + i, (size_t)t->lanes * 4);
        }
    }
    _tile_release();
}
#endif

/* `dim` is t->dim, a constant where that is a common one: so the addresses of all keys need one register. */
static inline __attribute__((always_inline)) void vector_scores_of(const Task *t, const int bf16, const int64_t dim) {
    const int64_t row = dim * (bf16 ? 2 : 4);
    const float *query = t->query;
    for (int64_t c = 0; c < t->columns; c += KEYS) {
        fetch(t->keys + c * row + AHEAD, KEYS * row);
        for (int64_t i = 0; i < t->lanes; i += LANES) {
            vf s[KEYS] = {{0}};
            for (int64_t d = 0; d < dim; d++)
                for (int k = 0; k < KEYS; k++)
                    s[k] = fused(all(get(t->keys + (c + k) * row, bf16, d)), *(const vf *)(query + d * t->lanes + i), s[k]);
            for (int k = 0; k < KEYS; k++) *(vf *)(t->score + (c + k) * t->lanes + i) = s[k];
        }
    }
}

static void vector_scores(const Task *t, int bf16) {
    if (t->dim == 64) bf16 ? vector_scores_of(t, 1, 64) : vector_scores_of(t, 0, 64);
    else if (t->dim == 128) bf16 ? vector_scores_of(t, 1, 128) : vector_scores_of(t, 0, 128);
    else bf16 ? vector_scores_of(t, 1, t->dim) : vector_scores_of(t, 0, t->dim);
}

/* Who sees the columns that not all see. */
static void look(const Attention *a, const Task *t) {
    memset(t->seen, 0, (size_t)((t->columns - t->common) * t->lanes) * 4);
    for (int64_t i = 0; i < t->count; i++) {
        const int64_t r = t->first + i / t->group;
        for (int64_t c = t->common; c < a->contiguous[r]; c++) t->seen[(c - t->common) * t->lanes + i] = -1;
        for (int64_t j = a->tail_start[r]; j < a->tail_start[r + 1]; j++)
            if (a->tail[j] >= t->common) t->seen[(a->tail[j] - t->common) * t->lanes + i] = -1;
    }
}

/* Scores to weights, in place, and their totals. */
static void soften(const Task *t, float scale) {
    for (int64_t i = 0; i < t->lanes; i += LANES) {
        float *s = t->score + i;
        const int32_t *seen = t->seen + i - t->common * t->lanes;
        vf top = (vf){0} - INFINITY, total = {0};
        int64_t c = 0;
        for (; c < t->common; c++) {
            const vf x = *(vf *)(s + c * t->lanes);
            const vi above = x > top;
            top = (vf)(((vi)x & above) | ((vi)top & ~above));
        }
        for (; c < t->columns; c++) {
            const vf x = *(vf *)(s + c * t->lanes);
            const vi above = (x > top) & *(const vi *)(seen + c * t->lanes);
            top = (vf)(((vi)x & above) | ((vi)top & ~above));
        }
        for (c = 0; c < t->common; c++) {
            const vf p = exp_nonpositive((*(vf *)(s + c * t->lanes) - top) * scale);
            total += p;
            *(vf *)(s + c * t->lanes) = p;
        }
        for (; c < t->columns; c++) {
            vf p = exp_nonpositive((*(vf *)(s + c * t->lanes) - top) * scale);
            p = (vf)((vi)p & *(const vi *)(seen + c * t->lanes));
            total += p;
            *(vf *)(s + c * t->lanes) = p;
        }
        *(vf *)(t->total + i) = total;
    }
}

static void widen_row(const char *row, int64_t dim, int64_t padded, int bf16, float *out) {
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) *(vf *)(out + d) = load(row, bf16, d);
    for (; d < dim; d++) out[d] = get(row, bf16, d);
    for (; d < padded; d++) out[d] = 0.0f;
}

/* sum[i][0 : padded] += weight[c][i] * values[c][0 : padded] over `count` columns, for QUADS queries. */
static inline __attribute__((always_inline)) void weigh(float *sum, const float *weight, int64_t lanes, const char *values,
                                                        const int bf16, int64_t padded, int64_t count) {
    int64_t d = 0;
    for (; d + WIDE * LANES <= padded; d += WIDE * LANES) {
        vf x[QUADS][WIDE];
        for (int i = 0; i < QUADS; i++)
            for (int j = 0; j < WIDE; j++) x[i][j] = *(vf *)(sum + i * padded + d + j * LANES);
        for (int64_t c = 0; c < count; c++) {
            vf v[WIDE];
            for (int j = 0; j < WIDE; j++) v[j] = load(values, bf16, c * padded + d + j * LANES);
            for (int i = 0; i < QUADS; i++)
                for (int j = 0; j < WIDE; j++) x[i][j] = fused(all(weight[c * lanes + i]), v[j], x[i][j]);
        }
        for (int i = 0; i < QUADS; i++)
            for (int j = 0; j < WIDE; j++) *(vf *)(sum + i * padded + d + j * LANES) = x[i][j];
    }
    for (; d < padded; d += LANES)
        for (int i = 0; i < QUADS; i++) {
            vf x = *(vf *)(sum + i * padded + d);
            for (int64_t c = 0; c < count; c++)
                x = fused(all(weight[c * lanes + i]), load(values, bf16, c * padded + d), x);
            *(vf *)(sum + i * padded + d) = x;
        }
}

static void sum_values(const Task *t, int bf16) {
    const int64_t row = t->dim * (bf16 ? 2 : 4);
    const int direct = t->padded == t->dim && (!bf16 || t->count <= QUADS); /* nothing to gain by widening first */
    for (int64_t c = 0; c < t->columns; c += SPAN) {
        const int64_t count = t->columns - c < SPAN ? t->columns - c : SPAN;
        const char *values = t->values + c * row;
        fetch(values + AHEAD, count * row);
        if (!direct)
            for (int64_t p = 0; p < count; p++)
                widen_row(values + p * row, t->dim, t->padded, bf16, t->span + p * t->padded);
        for (int64_t i = 0; i < t->count; i += QUADS) {
            float *sum = t->sum + i * t->padded;
            const float *weight = t->score + c * t->lanes + i;
            if (direct && bf16) weigh(sum, weight, t->lanes, values, 1, t->padded, count);
            else weigh(sum, weight, t->lanes, direct ? values : (const char *)t->span, 0, t->padded, count);
        }
    }
}

/* A value that is not finite turns a weight of zero into NaN: sums that came to that leave out what is not seen. */
static void mend(const Task *t, int bf16) {
    const int64_t row = t->dim * (bf16 ? 2 : 4);
    for (int64_t i = 0; i < t->count; i++) {
        float *sum = t->sum + i * t->padded, wrong = 0.0f;
        for (int64_t d = 0; d < t->dim; d++) wrong += sum[d] * 0.0f;
        if (wrong == 0.0f) continue;
        memset(sum, 0, (size_t)t->padded * 4);
        for (int64_t c = 0; c < t->columns; c++) {
            if (c >= t->common && !t->seen[(c - t->common) * t->lanes + i]) continue;
            for (int64_t d = 0; d < t->dim; d++)
                sum[d] = fused(all(t->score[c * t->lanes + i]), all(get(t->values + c * row, bf16, d)), all(sum[d]))[0];
        }
    }
}

static void write_out(const Attention *a, const Task *t, int64_t kv_head) {
    for (int64_t i = 0; i < t->count; i++) {
        const int64_t to = ((t->first + i / t->group) * a->heads + kv_head * t->group + i % t->group) * t->dim;
        const float *sum = t->sum + i * t->padded;
        int64_t d = 0;
        for (; d + LANES <= t->dim; d += LANES) store(a->out, a->q_bf16, to + d, *(vf *)(sum + d) / t->total[i]);
        for (; d < t->dim; d++) put(a->out, a->q_bf16, to + d, sum[d] / t->total[i]);
    }
}

/* Rows [first, last) of one slot, the queries that share one KV head. */
static int attend_task(const Attention *a, int64_t first, int64_t last, int64_t kv_head) {
    const int pairs = tiled(a);
    const int64_t dim = a->head_dim, unit = pairs ? SIDE : LANES;
    const int64_t plane = (a->slot[first] * a->kv_heads + kv_head) * a->length * dim * (a->kv_bf16 ? 2 : 4);
    Task t = {.first = first, .last = last, .group = a->heads / a->kv_heads, .dim = dim};
    t.padded = (dim + LANES - 1) / LANES * LANES;
    t.count = (last - first) * t.group;
    t.lanes = (t.count + unit - 1) / unit * unit;
    t.keys = (const char *)a->keys + plane;
    t.values = (const char *)a->values + plane;
    t.common = a->contiguous[first];
    for (int64_t r = first; r < last; r++) {
        if (a->contiguous[r] < t.common) t.common = a->contiguous[r];
        if (a->contiguous[r] > t.columns) t.columns = a->contiguous[r];
        for (int64_t j = a->tail_start[r]; j < a->tail_start[r + 1]; j++)
            if (a->tail[j] >= t.columns) t.columns = a->tail[j] + 1;
    }
    const int64_t rounded = (t.columns + SIDE - 1) / SIDE * SIDE;
    const int64_t floats = t.lanes * (dim + rounded + (t.columns - t.common) + 1 + t.padded) + SPAN * t.padded;
    float *memory = malloc((size_t)floats * 4 + 64);
    if (!memory) return 1;
    t.query = memory;
    t.score = memory + t.lanes * dim;
    t.seen = (int32_t *)(t.score + t.lanes * rounded);
    t.total = (float *)t.seen + t.lanes * (t.columns - t.common);
    t.sum = t.total + t.lanes;
    t.span = t.sum + t.lanes * t.padded;
    memset(t.query, 0, (size_t)(t.lanes * dim) * 4);
    memset(t.sum, 0, (size_t)(t.lanes * t.padded) * 4);
    gather(a, &t, kv_head, pairs);
#if TILED
    if (pairs) tile_scores(&t);
    else
#endif
        vector_scores(&t, a->kv_bf16);
    look(a, &t);
    soften(&t, a->scale);
    sum_values(&t, a->kv_bf16);
    mend(&t, a->kv_bf16);
    write_out(a, &t, kv_head);
    free(memory);
    return 0;
}

/* Returns 0, or 1 when memory ran out. Rows of one slot must be adjacent. */
int dt_attend(const Attention *a, int64_t rows, int threads) {
    const int64_t group = a->heads / a->kv_heads;
    const int64_t most = group < QUERIES ? QUERIES / group : 1;
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
