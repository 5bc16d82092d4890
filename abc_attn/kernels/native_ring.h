// One decoding step of a window, with or without sinks (banded.py: a memory whose rows are tokens). The new key and value
// replace one row of the memory in place, then each query reads all rows in use: the ring buffer of docs/maths.md and eq. 4. The
// memory is loaded once; that load is nearly all of the time.

// Floats of a row of scores: n rounded up to whole vectors. What is beyond n gets the score -inf, so no weight.
static inline int64_t ring_ld(const Ring *a) { return (a->n + VL - 1) / VL * VL; }
static size_t ring_scratch(const Ring *a) { return 4 * ring_ld(a); }

// out = (weights . values) * share for G queries and C vectors of the values' width; share = 1 / sum of the weights.
template <int G, int C>
static inline void ring_values(const Ring *a, const float *weights, int64_t ld, const float *values, float *out,
                               const float *share) {
    vec acc[G][C] = {};
    for (int64_t j = 0; j < a->n; j++, values += a->e)
        for (int c = 0; c < C; c++) {
            vec value = load(values + c * VL);
            for (int g = 0; g < G; g++) acc[g][c] += weights[g * ld + j] * value;
        }
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) store(out + g * a->e + c * VL, acc[g][c] * share[g]);
}

// G query heads, from `first` on, that read the memory of one key head (`row` = batch element and key head).
template <int G>
static void ring_queries(const Ring *a, int64_t row, int64_t first, float *scores) {
    const int64_t n = a->n, d = a->d, ld = ring_ld(a), head = row * a->g + first;
    const float *keys = a->memory_k + row * n * d, *q = a->q + head * d;
    const float *to_sinks = a->to_sinks ? a->to_sinks + head * d : q;
    // 1. Scores: K q, or K to_sinks for the sinks
    for (int64_t j = 0; j < n; j++, keys += d) {
        const float *by = j < a->sinks ? to_sinks : q;
        vec dot[G] = {};
        for (int64_t c = 0; c < d; c += VL) {
            vec key = load(keys + c);
            for (int g = 0; g < G; g++) dot[g] += load(by + g * d + c) * key;
        }
        const bool read = !a->used || a->used[row * n + j];
        for (int g = 0; g < G; g++) scores[g * ld + j] = read ? sum(dot[g]) * a->scale : -INFINITY;
    }
    // 2. Softmax weights, not yet divided by their sum
    float share[G];
    for (int g = 0; g < G; g++) {
        float *s = scores + g * ld;
        for (int64_t j = n; j < ld; j++) s[j] = -INFINITY;
        vec top = load(s), total = {};
        for (int64_t j = VL; j < ld; j += VL) top = vmax(top, load(s + j));
        const vec most = splat(highest(top));
        for (int64_t j = 0; j < ld; j += VL) {
            vec weight = vexp<true>(load(s + j) - most);
            total += weight;
            store(s + j, weight);
        }
        share[g] = 1.0f / sum(total);
    }
    // 3. Output: weights . V / sum of the weights
    const float *values = a->memory_v + row * n * a->e;
    float *out = a->out + head * a->e;
    int64_t c = 0;
    for (; c + 4 * VL <= a->e; c += 4 * VL) ring_values<G, 4>(a, scores, ld, values + c, out + c, share);
    for (; c < a->e; c += VL) ring_values<G, 1>(a, scores, ld, values + c, out + c, share);
}

// Writes the new token over row `at`, then reads: up to 4 query heads at a time, which share each load of the memory.
static void ring_row(const Ring *a, int64_t row, float *scratch) {
    const int64_t at = row * a->n + a->at[row / a->heads];
    memcpy(a->memory_k + at * a->d, a->k + row * a->d, a->d * sizeof(float));
    memcpy(a->memory_v + at * a->e, a->v + row * a->e, a->e * sizeof(float));
    for (int64_t first = 0; first < a->g; first += 4) switch (a->g - first) {
            case 1: ring_queries<1>(a, row, first, scratch); break;
            case 2: ring_queries<2>(a, row, first, scratch); break;
            case 3: ring_queries<3>(a, row, first, scratch); break;
            default: ring_queries<4>(a, row, first, scratch);
        }
}
