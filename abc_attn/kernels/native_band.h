// Causal attention over a band (banded.py), without gradients: each query reads the last `window` keys and the sinks.
// A thread takes a chunk of BAND_CHUNK queries of one key head. It transposes the keys of the chunk once, then takes BAND_ROWS
// queries at a time, and multiplies only the columns that some of them can see (rounded out to whole vectors).

enum { BAND_ROWS = 24 };  // queries of one matrix product: four tiles of six rows

// Rounded up to whole vectors.
static inline int64_t round_up(int64_t count) { return (count + VL - 1) / VL * VL; }

// Columns of the scores: the sinks, then the keys of the chunk, each rounded up to whole vectors.
static int64_t band_columns(const Band *a) {
    const int64_t all = a->lead + a->t;
    return round_up(a->sinks) + round_up(a->window < all - BAND_CHUNK ? a->window + BAND_CHUNK : all);
}
static size_t band_scratch(const Band *a) { return band_columns(a) * (2 * a->d + a->e + BAND_ROWS); }

// Softmax weights of one query, in place of its scores z, over the sinks (columns [0, sinks), of which the first `seen` may be
// read) and the keys (columns [first, last), of which [from, to) lie in the band). Returns 1 / sum of the weights.
static float band_weights(const Band *a, float *z, int64_t sinks, int64_t seen, int64_t first, int64_t last, int64_t from,
                          int64_t to) {
    for (int64_t j = seen; j < sinks; j++) z[j] = -INFINITY;
    for (int64_t j = first; j < from; j++) z[j] = -INFINITY;
    for (int64_t j = to; j < last; j++) z[j] = -INFINITY;
    vec top = splat(-INFINITY), total = {};
    for (int64_t j = 0; j < sinks; j += VL) top = vmax(top, load(z + j));
    for (int64_t j = first; j < last; j += VL) top = vmax(top, load(z + j));
    const float best = highest(top) * a->scale;
    for (int64_t j = sinks ? 0 : first; j < last; j = j + VL == sinks ? first : j + VL) {
        vec weight = vexp<true>(load(z + j) * a->scale - best);
        total += weight;
        store(z + j, weight);
    }
    return 1 / sum(total);
}

// One chunk; `unit` counts the chunks of all rows (batch element and key head).
static void band_chunk(const Band *a, int64_t unit, float *scratch) {
    const int64_t chunks = (a->t + BAND_CHUNK - 1) / BAND_CHUNK, row = unit / chunks, batch = row / a->heads;
    const int64_t d = a->d, e = a->e, start = unit % chunks * BAND_CHUNK;
    const int64_t stop = start + BAND_CHUNK < a->t ? start + BAND_CHUNK : a->t;
    const int64_t oldest = a->lead + start - a->window + 1, low = oldest > 0 ? oldest : 0, count = a->lead + stop - low;
    const int64_t sinks = round_up(a->sinks), wide = sinks + round_up(count), total = a->lead + a->t;
    // Counts come from a state: those that no text has are taken as the nearest that one could have
    expect(a->count[batch] >= 0);
    const int64_t before = between(0, a->count[batch], a->sinks), missing = between(0, a->missing[batch], total);
    float *keys = scratch, *transposed_keys = keys + wide * d, *values = transposed_keys + wide * d, *z = values + wide * e;
    // 1. Copies the sinks and the chunk's keys and values side by side, and transposes the keys
    memset(keys, 0, wide * d * sizeof(float)), memset(values, 0, wide * e * sizeof(float));
    if (a->sinks) {  // without sinks the pointers may be null
        memcpy(keys, a->sink_k + row * a->sinks * d, a->sinks * d * sizeof(float));
        memcpy(values, a->sink_v + row * a->sinks * e, a->sinks * e * sizeof(float));
    }
    memcpy(keys + sinks * d, a->k + (row * total + low) * d, count * d * sizeof(float));
    memcpy(values + sinks * e, a->v + (row * total + low) * e, count * e * sizeof(float));
    transpose(wide, d, keys, d, transposed_keys, wide);
    for (int64_t head = row * a->g; head < (row + 1) * a->g; head++)
        for (int64_t i = start; i < stop; i += BAND_ROWS) {
            const int length = (int)(stop - i < BAND_ROWS ? stop - i : BAND_ROWS);
            const int64_t at = head * a->t + i, newest = a->lead + i;  // newest: the first query's own key
            const int64_t reach = newest - a->window + 1 - low, first = sinks + (reach > 0 ? reach / VL * VL : 0);
            const int64_t last = sinks + round_up(newest + length - low);
            float *out = a->out + at * e, share[BAND_ROWS];
            // 2. Scores K q, those of the sinks by their own query if there is one
            product(length, sinks, d, (a->to_sinks ? a->to_sinks : a->q) + at * d, d, 1, transposed_keys, wide, z, wide);
            product(length, last - first, d, a->q + at * d, d, 1, transposed_keys + first, wide, z + first, wide);
            // 3. Softmax weights inside the band
            for (int r = 0; r < length; r++) {
                int64_t from = newest + r - a->window + 1, seen = before + i + r + 1;
                from = from > missing ? from : missing;
                from = from > low ? from - low + sinks : sinks;
                const int64_t to = newest + r + 1 - low + sinks;
                share[r] = band_weights(a, z + r * wide, sinks, seen < a->sinks ? seen : a->sinks, first, last,
                                        from < to ? from : to, to);
            }
            // 4. Output: weights . V / sum of the weights (eq. 4)
            product(length, e, a->sinks, z, wide, 1, values, e, out, e);
            product<true>(length, e, last - first, z + first, wide, 1, values + first * e, e, out, e);
            for (int r = 0; r < length; r++)
                for (int64_t j = 0; j < e; j += VL) store(out + r * e + j, load(out + r * e + j) * share[r]);
        }
}
