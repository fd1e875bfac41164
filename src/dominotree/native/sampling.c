/* Drawing a token with Gumbel noise; the noise is that of sampling.py's gumbel_noise. */
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
