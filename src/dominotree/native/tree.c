/* The best-first heap over a Domino drafter's tries, one sequence a task.
 *
 * A node's state and products are computed when it is taken into the tree; its children are kept sorted, and the
 * frontier holds one cursor for each node taken, at its best child not yet taken. Order: score descending, depth
 * ascending, parent's place in the tree ascending, place among the candidates ascending.
 */
#include "common.h"

typedef struct {
    int64_t sequences, levels, width, size, children; /* K depths, M candidates, rows of the result, children a node */
    int64_t state, rank, hidden_size;                 /* G, E, H; state 0: scores do not depend on the path */
    int64_t vocab, words, prefix;                     /* V' + X, X, depths that are left uncorrected whatever the path */
    int64_t columns, ranks;                           /* padded 3G + E and E: row lengths of from_state, from_hidden */
    int weight_bf16, proj_bf16, hidden_bf16, base_bf16; /* weight: of from_state and from_hidden */
    int threads;
    const float *log_prob;      /* [sequences, levels, width] where scores do not depend on the path */
    const void *base;           /* [sequences, levels, V' + X] base logits, the last X of words of the sequence's own */
    const float *logits;        /* [sequences, levels, width] those of the candidates; null: base is */
    const int64_t *candidates;  /* [sequences, levels, width] draft-vocabulary indices, sequence b's words from V' + b X on;
                                 * null: all */
    const int64_t *d2t;         /* [V'] from a draft index to its target id, as an offset; null: the index is the id */
    const int64_t *word_ids;    /* [sequences X] target ids of words; null: d2t goes on */
    const void *hidden;         /* [sequences, levels, H] the backbone's output */
    const float *root;          /* [sequences, 3G] input parts of the roots */
    const float *scale;         /* [sequences] factor of every correction; null: 1 */
    const void *from_state;     /* [G, columns] */
    const void *from_hidden;    /* [H, ranks] */
    const float *input_table;   /* [V', 3G] */
    const float *word_inputs;   /* [sequences X, 3G] */
    const void *proj_out;       /* [V', E] */
    const int64_t *budget, *depth_limit; /* [sequences] */
    const float *calibration;   /* [levels, 2] slope and offset on the logit of a node's probability; null: as it is */
    const float *cost;          /* [sequences, size + 1] of a round that verifies so many nodes; null: of no account */
    const float *rate;          /* [sequences] tokens that a unit of it must gain; 0: what it does in this round; null: 0 */
    int64_t *token, *parent, *depth, *count; /* [sequences, size] and [sequences] */
    float *score, *given;       /* [sequences, size] */
} Forest;

#define OUT_OF_MEMORY 1
#define NOT_FINITE 2
#define PARALLEL 65536 /* multiplications of a node from which on a second thread pays */

typedef struct {
    float score, log_prob;
    int32_t place;
} Child;

static inline float sigmoid_one(float x) {
    float e = expf(-fabsf(x));
    return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

static inline vf sigmoid(vf x) {
    vi negative = x < 0.0f;
    vf e = exp_nonpositive(-(vf)((vi)x & 0x7fffffff));
    vf top = (vf)(((vi)e & negative) | ((vi)((vf){0} + 1.0f) & ~negative));
    return top / (1.0f + e);
}

/* out[columns] = x[n] @ weight[n, columns]; columns in whole vectors */
static void products(const float *x, int64_t n, const void *weight, int bf16, int64_t columns, float *out) {
    int64_t c = 0;
    for (; c + 8 * LANES <= columns; c += 8 * LANES) {
        vf a[8] = {{0}};
        for (int64_t i = 0; i < n; i++)
            for (int j = 0; j < 8; j++) a[j] = fused(all(x[i]), load(weight, bf16, i * columns + c + j * LANES), a[j]);
        for (int j = 0; j < 8; j++) *(vf *)(out + c + j * LANES) = a[j];
    }
    for (; c < columns; c += LANES) {
        vf a = {0};
        for (int64_t i = 0; i < n; i++) a = fused(all(x[i]), load(weight, bf16, i * columns + c), a);
        *(vf *)(out + c) = a;
    }
}

/* The GRU's next state (gates r, z, n, no biases) from a state, its products and a token's input part. */
static void gru(int64_t size, const float *state, const float *recurrent, const float *input, float *next) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vf r = sigmoid(*(vf *)(input + i) + *(vf *)(recurrent + i));
        vf z = sigmoid(*(vf *)(input + size + i) + *(vf *)(recurrent + size + i));
        vf n = sigmoid(2.0f * (*(vf *)(input + 2 * size + i) + r * *(vf *)(recurrent + 2 * size + i))) * 2.0f - 1.0f;
        *(vf *)(next + i) = n + z * (*(vf *)(state + i) - n);
    }
    for (; i < size; i++) {
        float r = sigmoid_one(input[i] + recurrent[i]), z = sigmoid_one(input[size + i] + recurrent[size + i]);
        float n = tanhf(input[2 * size + i] + r * recurrent[2 * size + i]);
        next[i] = n + z * (state[i] - n);
    }
}

static inline int64_t draft_id(const Forest *f, int64_t at, int64_t place) {
    if (f->candidates) return f->candidates[at * f->width + place];
    return place < f->vocab - f->words ? place : place + at / f->levels * f->words;
}

static inline int64_t target_id(const Forest *f, int64_t id) {
    const int64_t word = id - (f->vocab - f->words);
    if (f->word_ids && word >= 0) return f->word_ids[word];
    return f->d2t ? id + f->d2t[id] : id;
}

static inline const float *input_of(const Forest *f, int64_t id) {
    const int64_t word = id - (f->vocab - f->words);
    return word < 0 ? f->input_table + id * 3 * f->state : f->word_inputs + word * 3 * f->state;
}

/* What the backbone's output at depth `at` (counted through all sequences) adds inside the correction, into
 * part[ranks]; wide is scratch [hidden_size]. Returns 0, or NOT_FINITE. */
static int hidden_part(const Forest *f, int64_t at, float *wide, float *part) {
    for (int64_t i = 0; i < f->hidden_size; i++) wide[i] = get(f->hidden, f->hidden_bf16, at * f->hidden_size + i);
    products(wide, f->hidden_size, f->from_hidden, f->weight_bf16, f->ranks, part);
    float total = 0.0f;
    for (int64_t e = 0; e < f->rank; e++) total += part[e] * 0.0f; /* 0, or NaN where one is not finite */
    return total == 0.0f ? 0 : NOT_FINITE;
}

static inline float logit(const Forest *f, int64_t at, int64_t place) {
    return f->logits ? f->logits[at * f->width + place] : get(f->base, f->base_bf16, at * f->width + place);
}

/* log_prob[width] of the candidates of one depth without a correction, normalised over the whole vocabulary. Returns 0, or
 * NOT_FINITE. */
static int uncorrected(const Forest *f, int64_t at, float *log_prob) {
    const int64_t from = at * f->vocab;
    float top = -INFINITY;
    double total = 0.0;
    for (int64_t m = 0; m < f->width; m++) top = logit(f, at, m) > top ? logit(f, at, m) : top;
    int64_t i = 0;
    vf sum = {0};
    for (; i + LANES <= f->vocab; i += LANES) sum += exp_nonpositive(load(f->base, f->base_bf16, from + i) - top);
    for (; i < f->vocab; i++) total += expf(get(f->base, f->base_bf16, from + i) - top);
    const float normaliser = top + logf((float)(total + sum_lanes(sum)));
    for (int64_t m = 0; m < f->width; m++) log_prob[m] = logit(f, at, m) - normaliser;
    return isfinite(normaliser) ? 0 : NOT_FINITE;
}

/* log_prob[width] of the candidates of one depth, for a node with these products; inner is scratch [rank], log_prob has
 * room for whole vectors. Returns 0, or NOT_FINITE. */
static int conditional(const Forest *f, int64_t at, float scale, const float *hidden, const float *product, float *inner,
                        float *log_prob) {
    const float *given = product + 3 * f->state;
    int64_t e = 0;
    for (; e + LANES <= f->rank; e += LANES) {
        const vf x = *(const vf *)(hidden + e) + *(const vf *)(given + e);
        *(vf *)(inner + e) = x * sigmoid(x) * scale;
    }
    for (; e < f->rank; e++) {
        const float x = hidden[e] + given[e];
        inner[e] = x * sigmoid_one(x) * scale;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(f->threads) if (f->width * f->rank > PARALLEL)
#endif
    for (int64_t m = 0; m < f->width; m++) {
        const int64_t id = draft_id(f, at, m), row = id * f->rank;
        vf sum = {0};
        float rest = 0.0f;
        int64_t i = id < f->vocab - f->words ? 0 : f->rank; /* words are not corrected */
        for (; i + LANES <= f->rank; i += LANES) sum = fused(*(vf *)(inner + i), load(f->proj_out, f->proj_bf16, row + i), sum);
        for (; i < f->rank; i++) rest += inner[i] * get(f->proj_out, f->proj_bf16, row + i);
        log_prob[m] = logit(f, at, m) + (sum_lanes(sum) + rest);
    }
    float top = -INFINITY;
    for (int64_t m = 0; m < f->width; m++) top = log_prob[m] > top ? log_prob[m] : top;
    for (int64_t m = f->width; m % LANES; m++) log_prob[m] = -INFINITY;
    vf total = {0};
    for (int64_t m = 0; m < f->width; m += LANES) total += exp_nonpositive(*(vf *)(log_prob + m) - top);
    const float normaliser = top + logf(sum_lanes(total));
    for (int64_t m = 0; m < f->width; m++) log_prob[m] -= normaliser;
    return isfinite(normaliser) ? 0 : NOT_FINITE;
}

static inline int before(Child x, Child y) { return x.score > y.score || (x.score == y.score && x.place < y.place); }

/* The best `most` of all[n], in order, into best; insertion, since most are turned away by the first comparison. */
static int64_t keep_best(const Child *all, int64_t n, int64_t most, Child *best) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        if (kept == most && !before(all[i], best[kept - 1])) continue;
        int64_t at = kept < most ? kept++ : kept - 1;
        for (; at > 0 && before(all[i], best[at - 1]); at--) best[at] = best[at - 1];
        best[at] = all[i];
    }
    return kept;
}

/* The logarithm of the chance that a node at `depth` is accepted where its parent is. */
static float chance(const Forest *f, int64_t depth, float log_prob) {
    if (!f->calibration) return log_prob;
    const float p = expf(log_prob), kept = p < 1e-4f ? 1e-4f : p > 0.9999f ? 0.9999f : p;
    return -log1pf(expf(-(f->calibration[2 * depth] * logf(kept / (1.0f - kept)) + f->calibration[2 * depth + 1])));
}

/* The children of a node that may enter, best first: at most f->children by log-probability, then `most` by score. */
static int64_t sort_children(const Forest *f, int64_t depth, float parent, const float *log_prob, int64_t most, Child *scratch,
                             Child *out) {
    Child *all = scratch, *capped = scratch + f->width;
    int64_t n = 0;
    for (int64_t m = 0; m < f->width; m++)
        if (log_prob[m] > -INFINITY) all[n++] = (Child){log_prob[m], log_prob[m], (int32_t)m};
    if (f->children < n) {
        n = keep_best(all, n, f->children, capped);
        all = capped;
    }
    if (f->calibration) { /* keeps the order, so that only those that stay need it */
        n = keep_best(all, n, most, out);
        for (int64_t i = 0; i < n; i++) out[i].score = parent + chance(f, depth, out[i].log_prob);
        return n;
    }
    for (int64_t i = 0; i < n; i++) all[i].score = parent + all[i].log_prob;
    return keep_best(all, n, most, out);
}

static int grow_tree(const Forest *f, int64_t b) {
    const int64_t budget = f->budget[b] < f->size ? f->budget[b] : f->size;
    const int64_t limit = f->depth_limit[b] < f->levels ? f->depth_limit[b] : f->levels;
    int64_t *token = f->token + b * f->size, *parent = f->parent + b * f->size, *depth = f->depth + b * f->size;
    float *score = f->score + b * f->size, *given_to = f->given + b * f->size;
    const float *cost = f->cost ? f->cost + b * (f->size + 1) : 0;
    float gained = 1.0f; /* tokens that the round is expected to commit */
    for (int64_t i = 0; i < f->size; i++) token[i] = 0, parent[i] = -1, depth[i] = 0, score[i] = given_to[i] = -INFINITY;
    f->count[b] = 0;
    if (budget <= 0 || limit <= 0) return 0;
    const int64_t most = budget < f->width ? budget : f->width, record = f->state + f->columns;
    const int64_t nodes = budget, wide = f->width + LANES; /* the root is node 0 */
    float *records = malloc((size_t)(nodes * record + f->rank + wide + f->hidden_size + limit * f->ranks) * sizeof(float) + 64);
    Child *sorted = malloc((size_t)(nodes * most + 2 * f->width) * sizeof(Child));
    int64_t *cursor = calloc((size_t)(3 * nodes + limit), sizeof(int64_t));
    int failed = 0;
    if (!records || !sorted || !cursor) failed = OUT_OF_MEMORY;
    int64_t *known = cursor + nodes, *chosen_id = known + nodes, *ready = chosen_id + nodes;
    float *inner = records + nodes * record, *log_prob = inner + f->rank, *input = log_prob + wide;
    float *parts = input + f->hidden_size;
    Child *scratch = sorted + nodes * most;
    for (int64_t taken = 0; !failed && taken < budget; taken++) { /* node `taken` (0: the root) was taken last: its children come next */
        const int64_t node = taken - 1, below = taken ? depth[node] + 1 : 0, at = b * f->levels + below;
        if (below < limit) {
            float *own = records + taken * record;
            if (f->state) {
                const float *above = own, *with = f->root + b * 3 * f->state;
                if (taken) {
                    above = records + (parent[node] + 1) * record;
                    with = input_of(f, chosen_id[taken]);
                } else {
                    memset(own, 0, (size_t)record * sizeof(float)); /* the empty path: zero state, zero products */
                }
                gru(f->state, above, above + f->state, with, own);
                products(own, f->state, f->from_state, f->weight_bf16, f->columns, own + f->state);
            }
            const float *given = log_prob;
            if (!f->state) given = f->log_prob + at * f->width;
            else if (below < f->prefix) failed |= uncorrected(f, at, log_prob);
            else {
                float *part = parts + below * f->ranks;
                if (!ready[below]) failed |= hidden_part(f, at, input, part);
                ready[below] = 1;
                failed |= conditional(f, at, f->scale ? f->scale[b] : 1.0f, part, own + f->state, inner, log_prob);
            }
            known[taken] = sort_children(f, below, taken ? score[node] : 0.0f, given, most, scratch, sorted + taken * most);
        }
        int64_t best = -1, best_depth = 0;
        float best_score = -INFINITY;
        for (int64_t i = 0; i <= taken; i++) {
            if (cursor[i] == known[i]) continue;
            const float here = sorted[i * most + cursor[i]].score;
            const int64_t level = i ? depth[i - 1] + 1 : 0;
            if (best < 0 || here > best_score || (here == best_score && level < best_depth))
                best = i, best_depth = level, best_score = here;
        }
        if (best < 0 || !(best_score > -INFINITY)) break;
        const float gain = expf(best_score), rate = f->rate ? f->rate[b] : 0.0f;
        if (cost && rate > 0.0f && gain <= rate * (cost[taken + 1] - cost[taken])) break; /* one more node would not pay */
        if (cost && !(rate > 0.0f) && (gained + gain) * cost[taken] <= gained * cost[taken + 1]) break;
        gained += gain;
        const Child *chosen = &sorted[best * most + cursor[best]++];
        const int64_t id = draft_id(f, b * f->levels + best_depth, chosen->place);
        if (taken + 1 < budget) chosen_id[taken + 1] = id;
        token[taken] = target_id(f, id);
        parent[taken] = best - 1;
        depth[taken] = best_depth;
        score[taken] = chosen->score;
        given_to[taken] = chosen->log_prob;
        f->count[b] = taken + 1;
    }
    free(records), free(sorted), free(cursor);
    return failed;
}

/* Returns 0, OUT_OF_MEMORY, or NOT_FINITE where the backbone's output is. Rows beyond a tree's count are padding. */
int dt_grow(const Forest *f) {
    if (f->sequences == 1) return grow_tree(f, 0); /* outside any region, so that its own has the threads that wait */
    int failed = 0;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) num_threads(f->threads) reduction(| : failed)
#endif
    for (int64_t b = 0; b < f->sequences; b++) failed |= grow_tree(f, b);
    return failed;
}

/* The k largest of each row of values[rows, width], value descending, then index ascending. Returns how many rows hold
 * a NaN or have no finite largest value. */
int64_t dt_top(const void *values, int bf16, int64_t rows, int64_t width, int64_t k, float *out, int64_t *index, int threads) {
    int64_t wrong = 0;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) reduction(+ : wrong) if (rows > 1)
#endif
    for (int64_t r = 0; r < rows; r++) {
        float *best = out + r * k;
        int64_t *where = index + r * k, kept = 0;
        int bad = 0;
        for (int64_t c = 0; c < width; c += LANES) {
            const int64_t end = c + LANES < width ? c + LANES : width;
            if (kept == k && end - c == LANES) { /* most vectors hold nothing that is larger than the least one kept */
                const vf x = load(values, bf16, r * width + c);
                if (!any((x > best[k - 1]) | (x != x))) continue;
            }
            for (int64_t i = c; i < end; i++) {
                const float x = get(values, bf16, r * width + i);
                bad |= x != x;
                if (kept == k && !(x > best[k - 1])) continue;
                int64_t at = kept < k ? kept++ : k - 1;
                for (; at > 0 && x > best[at - 1]; at--) best[at] = best[at - 1], where[at] = where[at - 1];
                best[at] = x, where[at] = i;
            }
        }
        wrong += bad || !isfinite(best[0]);
    }
    return wrong;
}
