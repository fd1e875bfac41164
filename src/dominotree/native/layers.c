/* Decoder layers one after another: the same kernels in the same order as layer by layer, without the way back. */
#include "common.h"
#include "pass.h"

typedef struct {
    const void *input_norm, *mlp_norm;
    const void *q_norm, *k_norm; /* [head_dim], or null */
    const Linear *qkv, *output, *gate_up, *down;
} Layer;

/* Buffers of a pass: x [rows, hidden] is read and written, the rest is scratch. All of one dtype. */
typedef struct {
    int64_t rows, hidden, intermediate, plane; /* plane: bytes of one layer's keys (or values) in the cache */
    float eps;
    int bf16;
    void *x, *normed, *delta, *qkv, *gate_up, *active;
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

/* Layers first .. last - 1. `a` and `s` are complete but for the layer's own pointers; a->keys and a->values are those
 * of layer 0. Returns 0, or 1 when memory ran out. */
int dt_layers(const Layer *layers, int64_t first, int64_t last, const Pass *p, const Attention *a, const RopeStore *s,
              int threads) {
    const void *delta = 0;
    for (int64_t i = first; i < last; i++) {
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
        int failed = dt_linear(layer->qkv, p->normed, p->qkv, p->bf16, p->rows, threads);
        dt_rope_store(&rope, threads);
        failed |= dt_attend(&attention, p->rows, threads);
        failed |= dt_linear(layer->output, attention.out, p->delta, p->bf16, p->rows, threads);
        dt_add_norm(p->x, p->delta, layer->mlp_norm, p->normed, p->bf16, p->rows, p->hidden, p->eps, threads);
        failed |= dt_linear(layer->gate_up, p->normed, p->gate_up, p->bf16, p->rows, threads);
        dt_swiglu(p->gate_up, p->active, p->bf16, p->rows, p->intermediate, threads);
        failed |= dt_linear(layer->down, p->active, p->delta, p->bf16, p->rows, threads);
        if (failed) return 1;
        delta = p->delta;
    }
    if (delta) add(p->x, delta, p->bf16, p->rows, p->hidden);
    return 0;
}

/* Lets the threads go that the calling thread has had for its parallel regions. While a process has more of them than
 * processors, those of every thread sleep between regions, and waking them costs more than a region. */
void dt_rest(void) {
#if defined(_OPENMP) && !defined(__clang__) && __GNUC__ >= 9
    omp_pause_resource_all(omp_pause_hard);
#endif
}
