/* What the kernels of a pass are told; the same structures are in native/__init__.py. */
#ifndef DOMINOTREE_PASS_H
#define DOMINOTREE_PASS_H

#include <stdint.h>

typedef struct {
    int64_t heads, kv_heads, head_dim, length; /* length: columns a slot holds */
    float scale;
    int q_bf16, kv_bf16;
    const void *q;                   /* [rows, heads, head_dim] */
    const void *keys, *values;       /* [slots, kv_heads, length, head_dim] */
    void *out;                       /* [rows, heads, head_dim], dtype of q */
    const int64_t *slot;             /* [rows] */
    const int64_t *contiguous;       /* [rows] columns 0 .. contiguous-1 are seen */
    const int64_t *tail_start;       /* [rows + 1] */
    const int64_t *tail;             /* further columns seen, by position */
} Attention;

typedef struct {
    int64_t rows, heads, kv_heads, head_dim, length, stride;
    float eps;
    int bf16, kv_bf16;
    void *qkv;
    const void *q_norm, *k_norm;
    const float *cos, *sin;          /* [positions, head_dim / 2] */
    void *q_out, *keys, *values;
    const int64_t *position, *slot, *column; /* [rows] */
} RopeStore;

enum { FP32, BF16, INT8 };

typedef struct {
    int64_t in, out;
    int kept; /* the panels' type */
    const void *panels;
    const float *bias, *scale; /* [out] each, or null; scale: of the weights of each output feature */
} Linear;

void dt_add_norm(void *x, const void *delta, const void *weight, void *out, int bf16, int64_t rows, int64_t dim,
                 float eps, int threads);
void dt_argmax(const void *values, int bf16, int64_t rows, int64_t width, int64_t *index, int threads);
void dt_swiglu(const void *gate_up, void *out, int bf16, int64_t rows, int64_t dim, int threads);
void dt_rope_store(const RopeStore *a, int threads);
int dt_attend(const Attention *a, int64_t rows, int threads);
int dt_bf16(void);
int dt_linear(const Linear *a, const void *x, void *y, int bf16, int64_t rows, int64_t stride, int threads);

#endif
