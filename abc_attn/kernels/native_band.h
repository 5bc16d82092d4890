// Attention over a band (banded.py), without gradients: each query reads the last `window` keys, and the sinks.
// Threads share out stretches of queries, whose keys are turned once; what of them lies outside the band is not multiplied.

enum { TOGETHER = 24 };  // queries of one product: four tiles of six

static inline int64_t whole(int64_t count) { return (count + VL - 1) / VL * VL; }

// Columns: sinks, then the keys of the stretch, each filled up to whole vectors.
static int64_t band_columns(const Band *a) {
    const int64_t most = a->window + STRETCH, all = a->lead + a->t;
    return whole(a->sinks) + whole(most < all ? most : all);
}
static size_t band_scratch(const Band *a) { return band_columns(a) * (2 * a->d + a->e + TOGETHER); }

// The weights of one query over the columns [0, sinks) and [first, last), of which [from, to) lie in the band.
// Returns 1 / their sum.
static float band_weights(const Band *a, float *z, int64_t sinks, int64_t seen, int64_t first, int64_t last, int64_t from, int64_t to) {
    for (int64_t j = seen; j < sinks; j++) z[j] = -INFINITY;
    for (int64_t j = first; j < from; j++) z[j] = -INFINITY;
    for (int64_t j = to; j < last; j++) z[j] = -INFINITY;
    vec top = splat(-INFINITY), total = {};
    for (int64_t j = 0; j < sinks; j += VL) top = vmax(top, load(z + j));
    for (int64_t j = first; j < last; j += VL) top = vmax(top, load(z + j));
    const float best = highest(top) * a->scale;
    for (int64_t j = sinks ? 0 : first; j < last; j = j + VL == sinks ? first : j + VL) {
        vec weight = vexp(load(z + j) * a->scale - best);
        total += weight;
        store(z + j, weight);
    }
    return 1 / sum(total);
}

static void band_stretch(const Band *a, int64_t unit, float *scratch) {
    const int64_t stretches = (a->t + STRETCH - 1) / STRETCH, row = unit / stretches, batch = row / a->heads;
    const int64_t d = a->d, e = a->e, start = unit % stretches * STRETCH, stop = start + STRETCH < a->t ? start + STRETCH : a->t;
    const int64_t oldest = a->lead + start - a->window + 1, low = oldest > 0 ? oldest : 0, count = a->lead + stop - low;
    const int64_t sinks = whole(a->sinks), wide = sinks + whole(count), total = a->lead + a->t;
    float *keys = scratch, *turned = keys + wide * d, *values = turned + wide * d, *z = values + wide * e;
    memset(keys, 0, wide * d * sizeof(float)), memset(values, 0, wide * e * sizeof(float));
    if (a->sinks) {  // of none there may be no address
        memcpy(keys, a->sink_k + row * a->sinks * d, a->sinks * d * sizeof(float));
        memcpy(values, a->sink_v + row * a->sinks * e, a->sinks * e * sizeof(float));
    }
    memcpy(keys + sinks * d, a->k + (row * total + low) * d, count * d * sizeof(float));
    memcpy(values + sinks * e, a->v + (row * total + low) * e, count * e * sizeof(float));
    transpose(wide, d, keys, d, turned, wide);
    for (int64_t head = row * a->g; head < (row + 1) * a->g; head++)
        for (int64_t i = start; i < stop; i += TOGETHER) {
            const int length = (int)(stop - i < TOGETHER ? stop - i : TOGETHER);
            const int64_t at = head * a->t + i, newest = a->lead + i;  // the first query's own key
            const int64_t reach = newest - a->window + 1 - low, first = sinks + (reach > 0 ? reach / VL * VL : 0);
            const int64_t last = sinks + whole(newest + length - low);
            float *out = a->out + at * e, share[TOGETHER];
            product(length, sinks, d, (a->to_sinks ? a->to_sinks : a->q) + at * d, d, 1, turned, wide, z, wide);
            product(length, last - first, d, a->q + at * d, d, 1, turned + first, wide, z + first, wide);
            for (int r = 0; r < length; r++) {
                int64_t from = newest + r - a->window + 1, seen = a->count[batch] + i + r + 1;
                from = from > a->missing[batch] ? from : a->missing[batch];
                from = from > low ? from - low + sinks : sinks;
                const int64_t to = newest + r + 1 - low + sinks;
                share[r] = band_weights(a, z + r * wide, sinks, seen < a->sinks ? seen : a->sinks, first, last,
                                        from < to ? from : to, to);
            }
            product(length, e, a->sinks, z, wide, 1, values, e, out, e);
            product<true>(length, e, last - first, z + first, wide, 1, values + first * e, e, out, e);
            for (int r = 0; r < length; r++)
                for (int64_t j = 0; j < e; j += VL) store(out + r * e + j, load(out + r * e + j) * share[r]);
        }
}
