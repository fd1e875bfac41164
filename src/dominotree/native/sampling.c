/* Gumbel noise: drawing a token with it, exactly, and foreseeing it, approximately. It is that of sampling.py's
 * gumbel_noise. */
#include "common.h"

#define CHUNK 512 /* tokens whose bounds are computed together */

static inline uint64_t noise_bits(uint64_t start, int64_t token) {
    uint64_t x = (uint64_t)(token + 1) * 0x9E3779B97F4A7C15u + start;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x = (x ^ (x >> 31)) >> 11;
    return x < (1ull << 53) - 2 ? x : (1ull << 53) - 2; /* the next number rounds to a uniform of 1 */
}

static double perturbed(float logit, float highest, double temperature, uint64_t start, int64_t token) {
    const double uniform = ((double)noise_bits(start, token) + 0.5) * 0x1p-53;
    return ((double)logit - (double)highest) / temperature - log(-log(uniform));
}

/* Nothing in a chunk is drawn whose bound stays below the best sum so far. With w = 1 - uniform the noise is at most
 * -log(w), and w is at least a power of two that its own bits tell; the logarithms themselves are rarely needed. */
static void bounds(const float *logit, float highest, float inverse, uint64_t start, int64_t from, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t rest = (int64_t)((1ull << 53) - noise_bits(start, from + i)); /* w is (rest - 0.5) / 2^53 */
        const double w = (double)rest - 0.5;
        int64_t bits;
        memcpy(&bits, &w, 8);
        const float halvings = (float)(53 + 1023 - (int)(bits >> 52)); /* w >= 2^-halvings */
        out[i] = (logit[i] - highest) * inverse + halvings * 0.6931472f;
    }
}

/* The argmax over tokens of (logit - largest logit) / temperature + noise, the first of equals; -1 where the row holds a
 * NaN, -2 where its largest logit is infinite. */
int64_t dt_draw(const void *logits, int bf16, int64_t vocab, double temperature, uint64_t start, int threads) {
    float highest = -INFINITY;
    int64_t top = 0;
    int bad = 0;
    for (int64_t i = 0; i < vocab; i++) {
        const float x = get(logits, bf16, i);
        bad |= x != x;
        if (x > highest) highest = x, top = i;
    }
    if (bad) return -1;
    if (!(fabsf(highest) < INFINITY)) return -2;
    const float inverse = (float)(1.0 / temperature);
    int64_t best = top;
    double most = perturbed(highest, highest, temperature, start, top);
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (vocab > 8192)
#endif
    for (int64_t from = 0; from < vocab; from += CHUNK) {
        const int64_t count = vocab - from < CHUNK ? vocab - from : CHUNK;
        float logit[CHUNK], bound[CHUNK];
        double known;
#ifdef _OPENMP
#pragma omp atomic read
#endif
        known = most;
        for (int64_t i = 0; i < count; i++) logit[i] = get(logits, bf16, from + i);
        bounds(logit, highest, inverse, start, from, count, bound);
        for (int64_t i = 0; i < count; i++) {
            if (logit[i] == -INFINITY) continue;
            const float slack = 1e-5f * fabsf(bound[i]) + 1e-5f; /* the bound is in single precision */
            if (bound[i] + slack < known) continue;
            const double sum = perturbed(logit[i], highest, temperature, start, from + i);
#ifdef _OPENMP
#pragma omp critical
#endif
            {
                if (sum > most || (sum == most && from + i < best)) most = sum, best = from + i;
                known = most;
            }
        }
    }
    return best;
}

/* log(x) of normal x > 0, relative error about 1e-7. */
static inline vf log_positive(vf x) {
    const vi e = ((vi)x - 0x3f3504f3) >> 23; /* leaves a mantissa between sqrt(1/2) and sqrt(2) */
    const vf n = __builtin_convertvector(e, vf), f = (vf)((vi)x - (e << 23)) - 1.0f;
    vf p = fused(f, all(7.0376836292e-2f), all(-1.1514610310e-1f));
    p = fused(p, f, all(1.1676998740e-1f));
    p = fused(p, f, all(-1.2420140846e-1f));
    p = fused(p, f, all(1.4249322787e-1f));
    p = fused(p, f, all(-1.6668057665e-1f));
    p = fused(p, f, all(2.0000714765e-1f));
    p = fused(p, f, all(-2.4999993993e-1f));
    p = fused(p, f, all(3.3333331174e-1f));
    return fused(n, all(0.693359375f), f + fused(p * f, f * f, fused(n, all(-2.12194440e-4f), -0.5f * (f * f))));
}

static inline vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* Noise of uniforms that are given with their distance from 1. */
static inline vf gumbel(vf uniform, vf rest) {
    const vf near = 1.0f - rest, lost = 1.0f - near; /* log1p(-rest), with the rounding of 1 - rest taken out again */
    const vi tiny = lost == 0.0f;
    const vf fine = choose(tiny, rest, -log_positive(near) * rest / choose(tiny, all(1.0f), lost));
    return -log_positive(choose(rest < 0.5f, fine, -log_positive(uniform)));
}

/* out[row, i] = scale * logits[row, i] + heat * noise(start[row], ids[i]), with noise in single precision */
void dt_couple(const void *logits, int bf16, int64_t rows, int64_t vocab, const int64_t *ids, const uint64_t *start, float scale,
               float heat, float *out, int threads) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static)
#endif
    for (int64_t row = 0; row < rows; row++)
        for (int64_t from = 0; from < vocab; from += CHUNK) {
            const int64_t count = vocab - from < CHUNK ? vocab - from : CHUNK;
            float uniform[CHUNK], rest[CHUNK], logit[CHUNK];
            for (int64_t i = 0; i < count; i++) {
                const int64_t bits = (int64_t)noise_bits(start[row], ids ? ids[from + i] : from + i);
                uniform[i] = (float)(((double)bits + 0.5) * 0x1p-53);
                rest[i] = (float)(((double)((1ll << 53) - bits) - 0.5) * 0x1p-53);
                logit[i] = get(logits, bf16, row * vocab + from + i);
            }
            for (int64_t i = count; i % LANES; i++) uniform[i] = rest[i] = 0.5f, logit[i] = 0.0f;
            for (int64_t i = 0; i < count; i += LANES)
                *(vf *)(logit + i) = *(vf *)(logit + i) * scale + gumbel(*(vf *)(uniform + i), *(vf *)(rest + i)) * heat;
            memcpy(out + row * vocab + from, logit, (size_t)count * sizeof(float));
        }
}
