/* Decoder layers one after another: the same kernels in the same order as layer by layer, without the way back. */
#include "common.h"
#include "pass.h"

typedef struct {
    const void *input_norm, *mlp_norm;
    const void *q_norm, *k_norm; /* [head_dim], or null */
    const Linear *qkv, *output, *gate_up, *down;
} Layer;

/* Buffers of a pass: x [rows, hidden] is read and written; normed, delta, qkv, gate_up and active are scratch. All of
 * one dtype. */
typedef struct {
    int64_t rows, hidden, intermediate, plane; /* plane: bytes of one layer's keys (or values) in the cache */
    float eps;
    int bf16;
    void *x, *normed, *delta, *qkv, *gate_up, *active;
    int64_t taps, picks, width;
    const int64_t *tapped;  /* [taps] layers whose outputs are wanted */
    void *features;         /* [rows, taps * hidden] those, side by side */
    const int64_t *picked;  /* [picks] rows that go on to the head; null: the first `picks` */
    const void *norm;
    void *last;             /* [picks, hidden] their normed outputs */
    const Linear *head;
    void *logits;           /* [picks, width], of which the head's outputs are written */
    int64_t *best;          /* [picks] places of the largest, as dt_argmax gives them; null: not wanted */
} Pass;

/* Row by row, since what is left over of whole vectors must be so whatever rows there are. */
static void add(void *x, const void *delta, int bf16, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t i = r * dim;
        const int64_t end = i + dim;
        for (; i + LANES <= end; i += LANES) store(x, bf16, i, load(x, bf16, i) + load(delta, bf16, i));
        for (; i < end; i++) put(x, bf16, i, get(x, bf16, i) + get(delta, bf16, i));
    }
}

/* Sets what layer i gave beside what other tapped layers did. */
static void tap(const Pass *p, int64_t i) {
    const size_t size = p->bf16 ? 2 : 4, row = (size_t)p->hidden * size;
    for (int64_t t = 0; t < p->taps; t++)
        for (int64_t r = 0; p->tapped[t] == i && r < p->rows; r++)
            memcpy((char *)p->features + (size_t)(r * p->taps + t) * row, (const char *)p->x + (size_t)r * row, row);
}

static int is_tapped(const Pass *p, int64_t i) {
    for (int64_t t = 0; t < p->taps; t++)
        if (p->tapped[t] == i) return 1;
    return 0;
}

/* All layers, then the last norm and the head. `a` and `s` are complete but for a layer's own pointers; a->keys and
 * a->values are those of layer 0. Returns 0, or 1 when memory ran out. */
int dt_layers(const Layer *layers, int64_t count, const Pass *p, const Attention *a, const RopeStore *s, int threads) {
    const void *delta = 0;
    int failed = 0;
    for (int64_t i = 0; i < count; i++) {
        const Layer *layer = layers + i;
        Attention attention = *a;
        RopeStore rope = *s;
        rope.keys = (char *)a->keys + i * p->plane;
        rope.values = (char *)a->values + i * p->plane;
        rope.q_norm = layer->q_norm;
        rope.k_norm = layer->k_norm;
        attention.keys = rope.keys;
        attention.values = rope.values;
        dt_add_norm(p->x, delta, layer->input_norm, p->normed, p->bf16, p->rows, p->hidden, p->eps, threads);
        failed |= dt_linear(layer->qkv, p->normed, p->qkv, p->bf16, p->rows, s->stride, threads);
        dt_rope_store(&rope, threads);
        failed |= dt_attend(&attention, p->rows, threads);
        failed |= dt_linear(layer->output, attention.out, p->delta, p->bf16, p->rows, p->hidden, threads);
        dt_add_norm(p->x, p->delta, layer->mlp_norm, p->normed, p->bf16, p->rows, p->hidden, p->eps, threads);
        failed |= dt_linear(layer->gate_up, p->normed, p->gate_up, p->bf16, p->rows, 2 * p->intermediate, threads);
        dt_swiglu(p->gate_up, p->active, p->bf16, p->rows, p->intermediate, threads);
        failed |= dt_linear(layer->down, p->active, p->delta, p->bf16, p->rows, p->hidden, threads);
        if (failed) return 1;
        delta = p->delta;
        if (is_tapped(p, i) || i + 1 == count) {
            add(p->x, delta, p->bf16, p->rows, p->hidden);
            delta = 0;
            tap(p, i);
        }
    }
    const size_t row = (size_t)p->hidden * (p->bf16 ? 2 : 4);
    for (int64_t r = 0; r < p->picks; r++)
        memcpy((char *)p->last + (size_t)r * row, (const char *)p->x + (size_t)(p->picked ? p->picked[r] : r) * row, row);
    dt_add_norm(p->last, 0, p->norm, p->last, p->bf16, p->picks, p->hidden, p->eps, threads);
    failed = dt_linear(p->head, p->last, p->logits, p->bf16, p->picks, p->width, threads);
    if (p->best) dt_argmax(p->logits, p->bf16, p->picks, p->width, p->best, threads);
    return failed;
}

/* Keys and values of `count` layers, stored as `s` says, from features [s->rows, fuse->in]: fused to one vector, normed,
 * projected to all layers' keys and values side by side. fused [rows, fuse->out] and both [rows, project->out] are scratch.
 * Returns 0, or 1 when memory ran out. */
int dt_encode(const Linear *fuse, const void *norm, float eps, const Linear *project, const Layer *layers, int64_t count,
              const void *features, void *fused, void *both, int64_t plane, const RopeStore *s, int threads) {
    int failed = dt_linear(fuse, features, fused, s->bf16, s->rows, fuse->out, threads);
    dt_add_norm(fused, 0, norm, fused, s->bf16, s->rows, fuse->out, eps, threads);
    failed |= dt_linear(project, fused, both, s->bf16, s->rows, project->out, threads);
    if (failed) return 1;
    for (int64_t i = 0; i < count; i++) {
        RopeStore rope = *s;
        rope.heads = 0;
        rope.stride = project->out;
        rope.qkv = (char *)both + i * (project->out / count) * (s->bf16 ? 2 : 4);
        rope.k_norm = layers[i].k_norm;
        rope.keys = (char *)s->keys + i * plane;
        rope.values = (char *)s->values + i * plane;
        dt_rope_store(&rope, threads);
    }
    return 0;
}

/* Lets the threads go that the calling thread has had for its parallel regions. While a process has more of them than
 * processors, those of every thread sleep between regions, and waking them costs more than a region. */
void dt_rest(void) {
#if defined(_OPENMP) && !defined(__clang__) && __GNUC__ >= 9
    omp_pause_resource_all(omp_pause_hard);
#endif
}
