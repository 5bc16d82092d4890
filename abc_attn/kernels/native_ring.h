// A step of a memory that holds tokens as they are (banded.py): the new key and value replace a row, then a softmax over
// all rows. The memory is read once, and that is what it costs.

// Rows of whole vectors: what fills a row of scores up weighs nothing.
static inline int64_t ring_ld(const Ring *a) { return (a->n + VL - 1) / VL * VL; }
static size_t ring_scratch(const Ring *a) { return 4 * ring_ld(a); }

// Each query's weights by the rows of values, C vectors of each, in its share of their sum.
template <int G, int C>
static inline void ring_values(const Ring *a, const float *weights, int64_t ld, const float *values, float *out, const float *share) {
    vec acc[G][C] = {};
    for (int64_t j = 0; j < a->n; j++, values += a->e)
        for (int c = 0; c < C; c++) {
            vec value = load(values + c * VL);
            for (int g = 0; g < G; g++) acc[g][c] += weights[g * ld + j] * value;
        }
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) store(out + g * a->e + c * VL, acc[g][c] * share[g]);
}

// G of the queries' heads that read one row of the memory.
template <int G>
static void ring_queries(const Ring *a, int64_t row, int64_t first, float *scores) {
    const int64_t n = a->n, d = a->d, ld = ring_ld(a), head = row * a->g + first;
    const float *keys = a->memory_k + row * n * d, *q = a->q + head * d;
    const float *to_sinks = a->to_sinks ? a->to_sinks + head * d : q;
    for (int64_t j = 0; j < n; j++, keys += d) {
        const float *by = j < a->sinks ? to_sinks : q;
        vec dot[G] = {};
        for (int64_t c = 0; c < d; c += VL) {
            vec key = load(keys + c);
            for (int g = 0; g < G; g++) dot[g] += load(by + g * d + c) * key;
        }
        for (int g = 0; g < G; g++) scores[g * ld + j] = sum(dot[g]) * a->scale;
    }
    float share[G];
    for (int g = 0; g < G; g++) {
        float *s = scores + g * ld;
        for (int64_t j = n; j < ld; j++) s[j] = -INFINITY;
        vec top = load(s), total = {};
        for (int64_t j = VL; j < ld; j += VL) top = vmax(top, load(s + j));
        const vec most = splat(highest(top));
        for (int64_t j = 0; j < ld; j += VL) {
            vec weight = vexp(load(s + j) - most);
            total += weight;
            store(s + j, weight);
        }
        share[g] = 1.0f / sum(total);
    }
    const float *values = a->memory_v + row * n * a->e;
    float *out = a->out + head * a->e;
    int64_t c = 0;
    for (; c + 4 * VL <= a->e; c += 4 * VL) ring_values<G, 4>(a, scores, ld, values + c, out + c, share);
    for (; c < a->e; c += VL) ring_values<G, 1>(a, scores, ld, values + c, out + c, share);
}

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
