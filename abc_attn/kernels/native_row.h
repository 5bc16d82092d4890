// What the passes over the tokens of one row (a batch element and key head) share: the memory's sums, and the chunk at hand.
//
// Tokens are taken in chunks. A chunk starts from the sums S of keys, values and the constant 1. Query t of the chunk reads
// (equation N1 of docs/maths.md, "The native backend")
//
//     K_tn = x_tn (S_n + sum_{j <= t} c_jn k_j)          and V and mass likewise
//
// which covers both ways of writing:
//     N2, running mean: log-weights l, running sum A            c_j = exp(l_j - top),   x_t = exp(top) / A_t
//         that forgets, f = exp(log_decay): with F_j the sum    c_j = (1 - f_j) exp(l_j + F_j - top)
//         of the log_decay still to come in the chunk, c and A are in the unit of its end
//     N3, phi and log_decay: L_t = log_decay summed over the    c_j = phi_j exp(-L_j),  x_t = exp(L_t)
//         chunk's tokens after its first, up to t
// Inside a chunk tokens are only added to the sums, and there is one division per query and slot. The forward pass writes
// and reads token by token (`Recurrence`); the backward pass turns a chunk into small matrix products. A chunk has 16 tokens
// forward and 32 backward. It is shorter, down to one token, where its exponents would span too wide a range; the result is
// exact in either case.

// What is carried from chunk to chunk: the sums S. The memory is `scale` times S.
// Keys (forward) or values (backward) are held transposed, as the matrix products need them; the other is `plain`.
struct Carry {
    bool values_transposed;
    float *transposed, *plain, *mass;  // width x np, np x width, np
    float *scale;                  // np
    float *top;                    // np   running mean: the running sum A is total * exp(top) ...
    float *level;                  // np   ... and at least exp(level), but for rounding
    double *total;
};

// One row's view of the arguments, with scratch memory for one chunk (backward: for all chunks of a span between checkpoints).
// np, dp, ep: n, d and e rounded up to whole vectors.
struct Row {
    const Args *a;
    int n, d, e, np, dp, ep, chunk;
    const float *q, *k, *v, *phi, *ld;
    const uint8_t *readable;
    uint8_t *used;
    float *room;  // scratch memory, handed out by `take`
    size_t taken;
    const float *keys, *values;  // of the chunk's tokens
    float *next, *reached, *fade, *before, *sums, *best, *total, *kb, *vb;
    const float *logs;  // the chunk's log-weights, see weigh
    float *first_c;
    size_t kept_rows;
    float *shrink, *x, *c, *inverse, *allow, *cumulative;  // of the chunk's tokens, `kept_rows` rows each

    // `count` floats of scratch memory, rounded up to whole cache lines.
    float *take(size_t count) {
        float *p = room + taken;
        taken += (count + 15) & ~(size_t)15;
        return p;
    }

    void sizes(const Args *args) {
        a = args;
        n = a->n, d = a->d, e = a->e;
        // The forward pass is fastest while a chunk stays in the first-level cache. Where a chunk is matrix products, its
        // fixed cost counts more, and longer chunks are faster.
        chunk = a->causal && !a->backward ? 16 : 32;
        np = (n + VL - 1) / VL * VL, dp = (d + VL - 1) / VL * VL, ep = (e + VL - 1) / VL * VL;
    }

    void begin(const Args *args, int64_t row, float *scratch) {
        sizes(args);
        int64_t t = a->t;
        q = a->q + row * a->g * a->queries * (a->linear ? n : d);
        k = a->k + row * t * d, v = a->v + row * t * e, phi = a->phi ? a->phi + row * t * n : nullptr;
        ld = a->log_decay ? a->log_decay + row * t * a->decay_width : nullptr;
        readable = a->readable ? a->readable + row * t * n : nullptr;
        used = nullptr;
        room = scratch, taken = 0;
        next = take(np), reached = take(np), fade = take(np), before = take(np), sums = take(np);
        best = take(chunk), total = take(chunk);
        kb = take(chunk * dp), vb = take(chunk * ep);
        kept_rows = a->backward ? SPAN : chunk;
        first_c = take(6 * kept_rows * np);
        chunk_at(0);
    }

    // Points c, x, ... to the rows of the chunk that starts `offset` tokens into the span.
    void chunk_at(int64_t offset) {
        size_t stride = kept_rows * np;
        c = first_c + offset * np, x = c + stride, shrink = x + stride;
        inverse = shrink + stride, allow = inverse + stride, cumulative = allow + stride;
    }

    void take_carry(Carry &s) {
        s.values_transposed = a->backward;
        s.transposed = take((s.values_transposed ? ep : dp) * np), s.plain = take(np * (s.values_transposed ? dp : ep));
        s.mass = take(np), s.scale = take(np), s.top = take(np), s.level = take(np), s.total = (double *)take(2 * np);
    }

    // Whether some slots may be hidden from some queries.
    bool masked() const { return a->mask_empty || readable || np != n; }

    // Whether the slot is in use after the token whose phi and log_decay are at `at`.
    bool still_used(size_t at, int slot) const {
        if (a->mean) return used[slot] || enters(at);
        return (used[slot] && !(ld && ld[at] == -INFINITY)) || phi[at] != 0;
    }

    // Whether the token enters a slot of a running mean.
    bool enters(size_t at) const {
        return (!phi || phi[at] > -INFINITY) && (!ld || forgotten(ld[a->decay_width == 1 ? at / n : at]) >= LEAST);
    }

    // Whether the slot is in use after the last token: the last write or emptying decides.
    bool used_after(int slot) const {
        for (int64_t at = a->t * n - n + slot; at >= 0; at -= n) {
            if (a->mean ? enters(at) : phi[at] != 0) return true;
            if (!a->mean && ld && ld[at] == -INFINITY) return false;
        }
        return used[slot];
    }

    // How many of the next `room` tokens can be one chunk: for decays see mild_length, for weights find_tops.
    int chunk_length(const Carry &s, int64_t from, int room) {
        if (!a->mean) return ld ? mild_length(from, room) : room;
        int length = room;
        if (!weigh(from, length)) length = mild_length(from, room), weigh(from, length);
        if (find_tops(s, length)) return length;
        weigh(from, 1), find_tops(s, 1);
        return 1;
    }

    // How many of the next `room` tokens decay no slot by more nats than they may, after the first of them.
    int mild_length(int64_t from, int room) {
        const int width = (int)a->decay_width;
        const float least = a->mean ? -MOST_FADED : -MOST_DECAYED;
        for (int j = 0; j < width; j++) x[j] = 0;
        for (int i = 1; i < room; i++) {
            bool wide = false;
            for (int j = 0; j < width; j++) x[j] += ld[(from + i) * width + j], wide |= !(x[j] >= least);
            if (wide) return i;
        }
        return room;
    }

    // Running mean: `logs`, the chunk's log-weights, each with what is forgotten at its token and what is kept from there to
    // the chunk's end; and `fade`, what the chunk keeps of the sums before it. Returns whether the decays are mild.
    bool weigh(int64_t from, int length) {
        if (phi) logs = padded(length, n, phi + from * n, c, np, -INFINITY);
        if (!ld) return true;
        const bool alike = a->decay_width == 1;
        const float *decays = alike ? nullptr : padded(length, n, ld + from * n, x, np, 0.0f);
        float *entering = total;  // of each token, where the slots decay alike
        for (int i = 0; alike && i < chunk; i++) entering[i] = i < length ? ld[from + i] : 0;
        for (int i = 0; alike && i < chunk; i += VL) store(entering + i, log_forgotten(load(entering + i)));
        ivec wide = {};
        for (int j = 0; j < np; j += VL) {
            vec later = {};
            for (int i = length - 1; i >= 0; i--) {
                const int l = i * np + j;
                if (!i) wide |= ~(later >= splat(-MOST_FADED));
                vec log = (alike ? splat(entering[i]) : log_forgotten(load(decays + l))) + later;
                store(inverse + l, phi ? load(logs + l) + log : log);
                later += alike ? splat(ld[from + i]) : load(decays + l);
            }
            store(fade + j, later);
        }
        logs = inverse;
        return !any(wide);
    }

    // Running mean: finds the chunk's `next` top, and whether the sums of all its tokens are at least e^-MOST_SPAN times it.
    // A top stays until the sum may be e^8 away from it, so the sums are seldom rescaled for it.
    bool find_tops(const Carry &s, int length) {
        ivec wide = {};
        for (int j = 0; j < np; j += VL) {
            vec top = load(s.top + j), level = load(s.level + j), first = load(logs + j), peak = first;
            for (int i = 1; i < length; i++) peak = vmax(peak, load(logs + i * np + j));
            if (ld) level += load(fade + j);
            vec highest = vmax(level, peak), moved = highest > top + 8.0f ? highest : top;
            if (ld) moved = highest < top - 8.0f ? highest : moved;
            store(next + j, moved), store(reached + j, ld ? highest : moved);
            // ~(... <= MOST_SPAN) and not > MOST_SPAN: a NaN (the first weight is -inf and others are not) must count as wide
            wide |= ~(moved - vmax(level, first) <= splat(MOST_SPAN)) & (moved != splat(-INFINITY));
        }
        return !any(wide);
    }

    // c and x of a chunk (N2 or N3), and which slots each query may read; S is rescaled to the chunk's units.
    void coefficients(Carry &s, int64_t from, int length) {
        if (a->mean) mean_coefficients(s, length);
        else decay_coefficients(s, from, length);
        memcpy(s.scale, x + (length - 1) * np, np * sizeof(float));
        rescale(s);
        if (masked() && a->causal) mask_slots(from, length);
        if (a->linear)  // the mass inside the chunk, before x: sums of c over j <= t
            for (int j = 0; j < np; j += VL) {
                vec sum = {};
                for (int i = 0; i < length; i++) sum += load(c + i * np + j), store(cumulative + i * np + j, sum);
            }
    }

    // N2. The running sum is kept in fp64 from chunk to chunk, in fp32 inside one.
    void mean_coefficients(Carry &s, int length) {
        const vec zero = {}, one = splat(1.0f);
        for (int j = 0; j < np; j += VL) {
            vec old = load(s.top + j), top = load(next + j), moved = old == top ? zero : old - (top == splat(-INFINITY) ? zero : top);
            store(shrink + j, ld ? vexp(moved + load(fade + j)) : old == top ? one : vexp(moved));
            store(s.top + j, top), store(s.level + j, load(reached + j));
        }
        for (int j = 0; j < np; j++) s.total[j] *= shrink[j], before[j] = (float)s.total[j];
        for (int j = 0; j < np; j += VL) {
            vec top = load(next + j), against = top == splat(-INFINITY) ? zero : top, start = load(before + j), sum = zero;
            for (int i = 0; i < length; i++) {
                vec weight = vexp(load(logs + i * np + j) - against);
                sum += weight;
                vec all = start + sum;
                store(c + i * np + j, weight);
                if (a->causal || i == length - 1) store(x + i * np + j, all > zero ? reciprocal(all) : zero);
            }
            store(sums + j, sum);
        }
        for (int j = 0; j < np; j++) s.total[j] += sums[j];
    }

    // N3. `inverse` = exp(-L_j) is kept for the gradient of phi.
    void decay_coefficients(const Carry &s, int64_t from, int length) {
        const vec zero = {}, one = splat(1.0f);
        const float *shares = padded(length, n, phi + from * n, c, np, 0.0f);
        const float *logs = ld ? padded(length, n, ld + from * n, x, np, 0.0f) : nullptr;
        for (int j = 0; j < np; j += VL) {
            vec sum = zero;
            store(shrink + j, logs ? load(s.scale + j) * vexp(load(logs + j)) : load(s.scale + j));
            for (int i = 0; i < length; i++) {
                int l = i * np + j;
                if (logs && i) sum += load(logs + l);
                vec back = logs ? vexp(-sum) : one;
                store(x + l, logs ? vexp(sum) : one);
                store(inverse + l, back);
                store(c + l, load(shares + l) * back);
            }
        }
    }

    // S *= shrink, per slot; skipped where nothing changes.
    void rescale(Carry &s) const {
        bool same = true;
        for (int j = 0; j < np; j++) same &= shrink[j] == 1.0f;
        if (same) return;
        for (int i = 0; i < (s.values_transposed ? e : d); i++)
            for (int j = 0; j < np; j += VL) store(s.transposed + i * np + j, load(s.transposed + i * np + j) * load(shrink + j));
        scale_rows(s.plain, s.values_transposed ? dp : ep, shrink);
        for (int j = 0; j < np; j += VL) store(s.mass + j, load(s.mass + j) * load(shrink + j));
    }

    void scale_rows(float *rows, int width, const float *by) const {
        for (int i = 0; i < n; i++)
            for (int j = 0; j < width; j += VL) store(rows + i * width + j, load(rows + i * width + j) * by[i]);
    }

    // allow = 0 where query t may read slot n, -inf where not; follows `used` from token to token.
    void mask_slots(int64_t from, int length) {
        for (int i = 0; i < length; i++)
            for (int j = 0; j < np; j++) {
                bool see = j < n;
                if (see) {
                    size_t at = (from + i) * n + j;
                    if (used) used[j] = still_used(at, j);
                    see = (!a->mask_empty || !used || used[j]) && (!readable || readable[at]);
                }
                allow[i * np + j] = see ? 0.0f : -INFINITY;
            }
    }

    // The chunk's keys and values as rows of whole vectors.
    void tokens(int64_t from, int length) {
        keys = padded(length, d, k + from * d, kb, dp, 0.0f);
        values = padded(length, e, v + from * e, vb, ep, 0.0f);
    }

    // S += sum_j c_j (x) [k_j, v_j, 1] over the chunk (eq. 5): the transposed half here, the plain half and the mass below.
    template <class Between = Nothing>
    void advance_transposed(Carry &s, int length, Between &&between = {}) const {
        const bool v = s.values_transposed;
        product<true>(v ? e : d, np, length, v ? values : keys, 1, v ? ep : dp, c, np, s.transposed, np, between);
    }

    template <class Between = Nothing>
    void advance_plain(Carry &s, int length, Between &&between = {}) const {
        const int width = s.values_transposed ? dp : ep;
        product<true>(n, width, length, c, 1, np, s.values_transposed ? keys : values, width, s.plain, width, between);
        advance_mass(s, length);
    }

    void advance_mass(Carry &s, int length) const {
        for (int j = 0; j < np; j += VL) {
            vec sum = load(s.mass + j);
            for (int i = 0; i < length; i++) sum += load(c + i * np + j);
            store(s.mass + j, sum);
        }
    }

    // The sums at the start, from the memory that was passed in.
    void load_memory(Carry &s, const float *mk, const float *mv, const float *mass, const double *log_total) const {
        memset(s.transposed, 0, dp * np * sizeof(float));
        memset(s.plain, 0, np * ep * sizeof(float));
        for (int i = 0; i < np; i++) {
            const bool real = i < n;
            const double logarithm = real && log_total ? log_total[i] : -INFINITY;
            s.top[i] = s.level[i] = (float)logarithm;
            s.total[i] = logarithm == -INFINITY ? 0.0 : exp(logarithm - (double)s.top[i]);
            const float by = log_total ? (float)s.total[i] : 1.0f;
            s.scale[i] = by == 0 ? 0 : 1 / by, s.mass[i] = 0.0f;
            if (!real || by == 0) continue;  // nothing was written yet
            s.mass[i] = mass[i] * by;
            for (int j = 0; j < d; j++) s.transposed[j * np + i] = mk[i * d + j] * by;
            for (int j = 0; j < e; j++) s.plain[i * ep + j] = mv[i * e + j] * by;
        }
    }

    // The memory after the last token, from the sums.
    void store_memory(const Carry &s, int64_t row) const {
        for (int i = 0; i < n; i++) {
            const int64_t slot = row * n + i;
            for (int j = 0; j < d; j++) a->memory_k[slot * d + j] = s.transposed[j * np + i] * s.scale[i];
            for (int j = 0; j < e; j++) a->memory_v[slot * e + j] = s.plain[i * ep + j] * s.scale[i];
            a->mass[slot] = s.mass[i] * s.scale[i];
            if (a->mean) a->log_total[slot] = s.total[i] == 0 ? -INFINITY : (double)s.top[i] + log(s.total[i]);
        }
    }

    // Softmax read (N4): the scores are scale x z, p their softmax; z becomes p x. Null `x` means ones, null `allow` that all
    // slots may be read. Scores and their log-sum-exp are saved for the backward pass if asked.
    void softmax_scores(int length, float *z, const float *x, const float *allow, float *scores, float *lse) const {
        for (int i = 0; i < length; i += 16)
            softmax_16_rows(length - i < 16 ? length - i : 16, z + i * np, x ? x + i * np : nullptr,
                            allow ? allow + i * np : nullptr, scores ? scores + (int64_t)i * n : nullptr,
                            lse ? lse + i : nullptr);
    }

    // At most 16 rows, which stay in the cache: each step runs over all of them, so no row waits for its own last step.
    void softmax_16_rows(int length, float *z, const float *x, const float *allow, float *scores, float *lse) const {
        const int all = length * np;
        const float scale = a->scale;
        if (x)
            for (int l = 0; l < all; l += VL) store(z + l, load(z + l) * scale * load(x + l));
        else
            for (int l = 0; l < all; l += VL) store(z + l, load(z + l) * scale);
        for (int l = 0; allow && l < all; l += VL) store(z + l, load(z + l) + load(allow + l));
        for (int i = 0; scores && i < length; i++) memcpy(scores + (int64_t)i * n, z + i * np, n * sizeof(float));
        switch (np / VL) {
            case 1: softmax_rows<1>(length, z); break;
            case 2: softmax_rows<2>(length, z); break;
            case 4: softmax_rows<4>(length, z); break;
            case 8: softmax_rows<8>(length, z); break;
            default: softmax_rows<0>(length, z);
        }
        for (int i = 0; lse && i < length; i++) lse[i] = total[i] == 0 ? -INFINITY : best[i] + logf(total[i]);
        for (int l = 0; x && l < all; l += VL) store(z + l, load(z + l) * load(x + l));
    }

    template <int J>  // vectors in a row, unrolled; 0: any number
    void softmax_rows(int length, float *z) const {
        const int vectors = J ? J : np / VL, width = vectors * VL;
        for (int i = 0; i < length; i++) {
            vec top = load(z + i * width);
#pragma GCC unroll 8
            for (int j = 1; j < vectors; j++) top = vmax(top, load(z + i * width + j * VL));
            const float high = highest(top);
            best[i] = high == -INFINITY ? 0 : high;
        }
        for (int i = 0; i < length; i++) {
            vec weights = {};
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) {
                float *at = z + i * width + j * VL;
                vec weight = vexp<true>(load(at) - best[i]);
                weights += weight;
                store(at, weight);
            }
            total[i] = sum(weights);
        }
        for (int i = 0; i < length; i++) {
            const float norm = total[i] == 0 ? 0 : 1 / total[i];
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) store(z + i * width + j * VL, load(z + i * width + j * VL) * norm);
        }
    }

    // The softmax weights p again, from the scores and log-sum-exp that the forward pass saved. Returns the scores as rows of
    // whole vectors.
    const float *recompute_weights(int length, const float *kept, const float *lse, float *room, float *weights) const {
        const float *scores = padded(length, n, kept, room, np, -INFINITY);
        for (int i = 0; i < length; i++) {
            const float against = lse[i] == -INFINITY ? 0 : lse[i];
            for (int j = 0; j < np; j += VL) store(weights + i * np + j, vexp<true>(load(scores + i * np + j) - against));
        }
        return scores;
    }

    // Backward of the softmax read (N5). In: p in z, d_out . V / x in y. Out: z = p x, y = scale x ds, the gradient of q . S;
    // u gains ds s + p dp, the gradient of log x_tn. Without x (not causal) the memory is read as it is.
    void softmax_backward(int length, const float *scores, float *z, float *y, const float *x, float *u, const float *d_lse) const {
        for (int i = 0; i < length; i++, z += np, y += np, scores += np) {
            vec dot = {};
            for (int j = 0; j < np; j += VL) {
                vec d_weight = x ? load(y + j) * load(x + i * np + j) : load(y + j);
                store(y + j, d_weight);
                dot += load(z + j) * d_weight;
            }
            const float mean = sum(dot) - (d_lse ? d_lse[i] : 0);
            for (int j = 0; j < np; j += VL) {
                vec weight = load(z + j), d_weight = load(y + j), d_score = weight * (d_weight - mean);
                if (!x) {
                    store(y + j, d_score * a->scale);
                    continue;
                }
                vec effect = weight == (vec){} ? (vec){} : d_score * load(scores + j) + weight * d_weight;
                vec share = load(x + i * np + j);
                store(u + i * np + j, load(u + i * np + j) + effect);
                store(y + j, d_score * a->scale * share);
                store(z + j, weight * share);
            }
        }
    }
};
