/* Vectors, conversions and exp, shared by the kernels. */
#ifndef DOMINOTREE_COMMON_H
#define DOMINOTREE_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Whether this processor has tiles; the system's leave to use them is another matter (dt_bf16). */
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define TILED 1
#else
#define TILED 0
#endif

/* Floats a vector: what the processor's registers hold, since compilers split wider ones badly. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), aligned(2)));

/* a * b + c, rounded once where the processor can: said outright, since what a compiler contracts depends on the loop
 * around it, and a row's bits must not. */
static inline vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

static inline vf all(float x) { return x - (vf){0}; }

static inline vf load_bf16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#endif
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}

#define SIDE 16 /* rows of a whole tile, each of 64 bytes; keys that attention scores at a time */

#if TILED
typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) Tiles;

static inline Tiles whole_tiles(void) {
    Tiles shape = {.palette = 1};
    for (int t = 0; t < 8; t++) shape.bytes[t] = 64, shape.rows[t] = SIDE;
    return shape;
}

/* To be followed by _tile_release. */
static inline void use_tiles(const Tiles *shape) {
    __asm__ volatile("" ::: "memory"); /* compilers do not know all that tiles read */
    _tile_loadconfig(shape);
}
#endif

static inline float widen(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint16_t narrow(float f) { /* round to nearest even; NaN stays NaN */
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

static inline float get(const void *p, int bf16, int64_t i) {
    return bf16 ? widen(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

static inline void put(void *p, int bf16, int64_t i, float x) {
    if (bf16) ((uint16_t *)p)[i] = narrow(x);
    else ((float *)p)[i] = x;
}

/* exp(x) for x <= 0, relative error about 1e-7. */
static inline vf exp_nonpositive(vf x) {
    const vf floor_x = (vf){0} - 87.0f;
    vi below = x < floor_x;
    x = (vf)(((vi)x & ~below) | ((vi)floor_x & below));
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vf n = fused(x, all(1.44269504088896341f), all(magic)) - magic;
    vf r = fused(n, all(2.12194440e-4f), fused(n, all(-0.693359375f), x));
    vf p = fused(r, all(1.9875691500e-4f), all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(p, r * r, r) + 1.0f;
    vi k = __builtin_convertvector(n, vi);
    return p * (vf)((k + 127) << 23);
}

static inline int any(vi x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#endif
    int found = 0;
    for (int j = 0; j < LANES; j++) found |= x[j];
    return found != 0;
}

static inline float sum_lanes(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#endif
    float total = 0.0f;
    for (int j = 0; j < LANES; j++) total += x[j];
    return total;
}

static inline vf load(const void *p, int bf16, int64_t i) {
    return bf16 ? load_bf16((const uint16_t *)p + i) : *(const vf *)((const float *)p + i);
}

static inline void store(void *p, int bf16, int64_t i, vf x) {
    if (!bf16) {
        *(vf *)((float *)p + i) = x;
        return;
    }
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)((uint16_t *)p + i), (__m256i)_mm512_cvtneps_pbh((__m512)x));
    return;
#endif
    vu u = (vu)x, rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    vu nan = (vu)(x != x);
    rounded = (rounded & ~nan) | (nan & 0x7fc0u);
    vh h = __builtin_convertvector(rounded, vh);
    memcpy((uint16_t *)p + i, &h, sizeof h);
}

#endif
