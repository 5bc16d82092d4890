// The backward pass over the tokens of one row, causal or not (docs/maths.md, N5 to N8).

// Gradients of the memory, or of the sums S: dK (np x dp), dV (np x ep), d mass (np).
struct MemoryGradient {
    float *k, *v, *mass;

    void load_gradient(Row &w, int64_t row) {
        k = w.take(w.np * w.dp), v = w.take(w.np * w.ep), mass = w.take(w.np);
        memset(k, 0, (size_t)w.np * w.dp * 4), memset(v, 0, (size_t)w.np * w.ep * 4), memset(mass, 0, w.np * 4);
        copy_rows(w.n, w.d, w.a->d_memory_k + row * w.n * w.d, k, w.dp);
        copy_rows(w.n, w.e, w.a->d_memory_v + row * w.n * w.e, v, w.ep);
        memcpy(mass, w.a->d_mass + row * w.n, w.n * 4);
    }

    void scale(const Row &w, const float *by) {
        w.scale_rows(k, w.dp, by), w.scale_rows(v, w.ep, by);
        for (int i = 0; i < w.n; i++) mass[i] *= by[i];
    }

    // The gradient of the logarithm of a factor on slot i: the inner product of the slot and its gradient. mk[i * k_row +
    // j * k_step] is entry j of its key; values likewise.
    double effect(const Row &w, int i, const float *mk, int k_row, int k_step, const float *mv, int v_row, int v_step,
                  float m) const {
        double dot = (double)mass[i] * m;
        for (int j = 0; j < w.d; j++) dot += (double)k[i * w.dp + j] * mk[i * k_row + j * k_step];
        for (int j = 0; j < w.e; j++) dot += (double)v[i * w.ep + j] * mv[i * v_row + j * v_step];
        return dot;
    }

    void store_gradient(const Row &w, int64_t row) const {
        for (int i = 0; i < w.n; i++) {
            const int64_t slot = row * w.n + i;
            if (w.d) memcpy(w.a->d_memory_k + slot * w.d, k + i * w.dp, w.d * 4);
            memcpy(w.a->d_memory_v + slot * w.e, v + i * w.ep, w.e * 4);
            w.a->d_mass[slot] = mass[i];
        }
    }
};

// Tokens (length x width) transposed to width x chunk. A chunk that is shorter is copied to `room` first, so that no load
// lies outside the tensor; what the missing rows hold does not matter.
static void transpose_tokens(int chunk, int length, int width, const float *from, float *room, float *to) {
    if (length < chunk && from != room && width) memcpy(room, from, (size_t)length * width * 4), from = room;
    transpose(chunk, width, from, width, to, chunk);
}

// p_tj = 0 for j > t: a query reads no later token.
static inline void clear_above_diagonal(float *p, int length, int chunk) {
    ivec column;
    for (int l = 0; l < VL; l++) column[l] = l;
    for (int i = 0; i < length; i++)
        for (int j = 0; j < chunk; j += VL) {
            vec kept = load(p + i * chunk + j);
            store(p + i * chunk + j, column + j <= i - (ivec){} ? kept : (vec){});
        }
}

// Causal: chunk by chunk, from the last to the first. With s_tn the scores and p the read weights,
//     N5   dp_tn = d_out_t . V_tn,   ds = p (dp - sum_n p dp),   u = ds s + p dp   (the gradient of log x_tn)
//     N6   dc_jn = sum_{t >= j} x_tn (scale ds_tn q_t . k_j + p_tn d_out_t . v_j)  +  d_memory_n . [k_j, v_j, 1]
//     N7   running mean:  dl_j = c_j (dc_j - sum_{t >= j} x_t u_t)
//     N8   decays:        d phi_j = exp(-L_j) dc_j,   d log_decay_j = sum_{t >= j} (u_t - phi_t d phi_t)
//     N9   running mean that forgets: log_decay_j adds to the logarithm of every earlier weight; with that of the sum that
//          was passed in, these and the later weights together do to log A what d_log_total says, and nothing to the means:
//                         d log_decay_j = d_log_total - sum_{t >= j} dl_t - dl_j f_j / (1 - f_j),   f = exp(log_decay)
// Sums at the chunks' starts are recomputed from the checkpoints, a span at a time.
static void backward_row(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.begin(a, row, scratch);
    Carry s;
    w.take_carry(s);
    const int n = w.n, d = w.d, e = w.e, np = w.np, dp = w.dp, ep = w.ep, chunk = w.chunk;
    const int64_t t = a->t, spans = (t + SPAN - 1) / SPAN;
    const size_t sums = sums_floats(w);
    float *qb = w.take(chunk * dp), *gb = w.take(chunk * ep), *vT = w.take(ep * chunk);
    float *kT = w.take(dp * chunk), *cT = w.take(np * chunk);
    float *scores = w.take(chunk * np), *y = w.take(chunk * np), *z = w.take(chunk * np), *u = w.take(chunk * np);
    float *dc = w.take(chunk * np), *later = w.take(np), *unscale = w.take(np), *den = w.take(chunk);
    float *pairs = w.take(chunk * chunk), *outer = w.take(chunk * chunk), *mix = w.take(chunk * chunk);
    float *dqb = w.take(chunk * dp), *dkb = w.take(chunk * dp), *dvb = w.take(chunk * ep);
    float *dcT = w.take(np * chunk);
    double *carried = (double *)w.take(2 * np);  // sums over later tokens; running mean: x u (N7), decays: u - phi d_phi (N8)
    double *rest = (double *)w.take(2 * np);     // d_log_total less the sum over later tokens of dl (N9)
    MemoryGradient d_memory;
    d_memory.load_gradient(w, row);
    float *starts = w.take(SPAN * sums);
    for (int64_t span = spans - 1; span >= 0; span--) {
        // 1. Forward through the span again: each chunk's start, length and sums at its start
        const int64_t first = span * SPAN, stop = first + SPAN < t ? first + SPAN : t;
        int64_t begins[SPAN];
        int lengths[SPAN], chunks = 0;
        load_checkpoint(w, s, a->checkpoints + (row * spans + span) * carry_floats(w));
        for (int i = 0; i < np; i++) unscale[i] = s.scale[i] == 0 ? 0 : 1 / s.scale[i];
        for (int64_t from = first; from < stop;) {
            for (int64_t end = from + chunk < stop ? from + chunk : stop, length; from < end; from += length) {
                w.chunk_at(from - first);
                length = w.chunk_length(s, from, end - from);
                begins[chunks] = from, lengths[chunks] = length;
                w.coefficients(s, from, length);
                float *to = starts + chunks++ * sums;
                memcpy(to, s.plain, np * dp * 4), memcpy(to + np * dp, s.transposed, ep * np * 4);
                memcpy(to + np * dp + ep * np, s.mass, np * 4);
                w.tokens(from, length);
                if (from + length < stop || span == spans - 1)
                    w.advance_transposed(s, length), w.advance_plain(s, length);
            }
        }
        if (span == spans - 1)
            for (int i = 0; i < np; i++) {
                carried[i] = rest[i] = 0;
                if (i >= n) continue;
                carried[i] = d_memory.effect(w, i, s.plain, dp, 1, s.transposed, 1, np, s.mass[i]) * s.scale[i];
                if (a->mean) carried[i] -= a->d_log_total[row * n + i], rest[i] = a->d_log_total[row * n + i];
            }
        // 2. Between spans d_memory is the gradient of the memory, inside one that of the sums: the passes scale sums differently
        d_memory.scale(w, s.scale);
        for (int i = 0; a->mean && i < n; i++) carried[i] *= s.scale[i];
        while (chunks--) {
            const int64_t from = begins[chunks];
            const int length = lengths[chunks];
            w.chunk_at(from - first);
            const float *K = starts + chunks * sums, *vt = K + np * dp, *mass = vt + ep * np;
            w.tokens(from, length);
            transpose_tokens(chunk, length, dp, w.keys, w.kb, kT);
            transpose_tokens(chunk, length, ep, w.values, w.vb, vT);
            transpose(chunk, np, w.c, np, cT, chunk);
            // 3. What the chunk's tokens gave to the sums after it: d_memory . [k, v, 1] to dc, c . d_memory to dk and dv
            float *dk = d == dp ? a->d_k + (row * t + from) * d : dkb, *dv = e == ep ? a->d_v + (row * t + from) * e : dvb;
            product(n, chunk, e, d_memory.v, ep, 1, vT, chunk, dcT, chunk);
            product<true>(n, chunk, d, d_memory.k, dp, 1, kT, chunk, dcT, chunk);
            transpose(np, chunk, dcT, chunk, dc, np);
            product(length, ep, n, w.c, np, 1, d_memory.v, ep, dv, ep);
            product(length, dp, n, w.c, np, 1, d_memory.k, dp, dk, dp);
            for (int i = 0; i < length; i++)
                for (int j = 0; j < np; j += VL) {
                    store(dc + i * np + j, load(dc + i * np + j) + load(d_memory.mass + j));
                    store(u + i * np + j, (vec){});
                }
            // 4. What the chunk's queries read, for each query head of the group
            for (int64_t group = 0; group < a->g; group++) {
                const int64_t at = (row * a->g + group) * t + from;
                const float *qs = a->linear ? padded(length, n, w.q + (group * t + from) * n, scores, np, 0.0f)
                                            : padded(length, d, w.q + (group * t + from) * d, qb, dp, 0.0f);
                const float *gs = padded(length, e, a->d_out + at * e, gb, ep, 0.0f);
                // 4a. y = dp / x (N5): d_out against the values before the chunk, and inside it (outer_tj = d_out_t . v_j)
                product(length, np, e, gs, ep, 1, vt, np, y, np);
                product<false, CORNER>(length, chunk, e, gs, ep, 1, vT, chunk, outer, chunk);
                clear_above_diagonal(outer, length, chunk);
                product<true, LOWER>(length, np, length, outer, chunk, 1, w.c, np, y, np);
                // 4b. Back through the read weights: z = p x, y = the gradient of q . S, u (N5)
                if (a->linear) {
                    // o = f(q) V / den; den = f(q) . mass is treated as one more column of V, that of the constant 1
                    linear_weights(w, mass, length, qs, z, den);
                    for (int i = 0; i < length; i++) {
                        for (int j = 0; j < np; j += VL) store(z + i * np + j, divide_or_zero(load(z + i * np + j), den[i]));
                        vec numerator = {};
                        for (int j = 0; j < np; j += VL) numerator += load(z + i * np + j) * load(y + i * np + j);
                        // at the floor the denominator is a constant
                        const float minus = a->floor && den[i] == a->floor ? 0.0f : -sum(numerator);
                        for (int j = 0; j < np; j += VL) {
                            int l = i * np + j;
                            vec ones = load(mass + j) + load(w.cumulative + l);
                            vec both = load(y + l) + ones * minus;
                            vec back = divide_or_zero(both * load(w.x + l), den[i]);
                            if (w.masked()) back = load(w.allow + l) == (vec){} ? back : (vec){};
                            store(u + l, load(u + l) + load(z + l) * both);
                            store(y + l, back);
                            store(d_memory.mass + j, load(d_memory.mass + j) + load(z + l) * minus);
                        }
                        memcpy(a->d_q + (at + i) * n, y + i * np, n * 4);
                        for (int j = 0; j <= i; j++) outer[i * chunk + j] += minus;
                    }
                } else {
                    const float *found = w.recompute_weights(length, a->scores + at * n, a->lse + at, scores, z);
                    w.softmax_backward(length, found, z, y, w.x, u, a->d_lse ? a->d_lse + at : nullptr);
                }
                // 4c. To the values: of the memory before the chunk (d_memory.v) and inside it (mix_tj = z_t . c_j); to c (N6)
                product<true>(n, ep, length, z, 1, np, gs, ep, d_memory.v, ep);
                product<false, CORNER>(length, chunk, n, z, np, 1, cT, chunk, mix, chunk);
                clear_above_diagonal(mix, length, chunk);
                product<true, UPPER>(length, ep, length, mix, 1, chunk, gs, ep, dv, ep);
                product<true, UPPER>(length, np, length, outer, 1, chunk, z, np, dc, np);
                if (a->linear) continue;  // no keys
                // 4d. To c (pairs_tj = q_t . k_j, N6), to q, and to the keys before the chunk and inside it
                product<false, CORNER>(length, chunk, d, qs, dp, 1, kT, chunk, pairs, chunk);
                clear_above_diagonal(pairs, length, chunk);
                product<true, UPPER>(length, np, length, pairs, 1, chunk, y, np, dc, np);
                float *to = d == dp ? a->d_q + at * d : dqb;
                product(length, dp, n, y, np, 1, K, dp, to, dp);
                product<true>(n, dp, length, y, 1, np, qs, dp, d_memory.k, dp);
                product<false, CORNER>(length, chunk, n, y, np, 1, cT, chunk, mix, chunk);
                clear_above_diagonal(mix, length, chunk);
                product<true, LOWER>(length, dp, length, mix, chunk, 1, w.keys, dp, to, dp);
                product<true, UPPER>(length, dp, length, mix, 1, chunk, qs, dp, dk, dp);
                for (int i = 0; to == dqb && i < length; i++) memcpy(a->d_q + (at + i) * d, dqb + i * dp, d * 4);
            }
            const int64_t at = row * t + from;
            for (int i = 0; i < length; i++) {
                if (dk == dkb) memcpy(a->d_k + (at + i) * d, dkb + i * dp, d * 4);
                if (dv == dvb) memcpy(a->d_v + (at + i) * e, dvb + i * ep, e * 4);
            }
            // 5. From c to the logits of a running mean (N7), or to phi and log_decay (N8)
            if (a->mean) {
                for (int j = 0; j < np; j++) later[j] = (float)carried[j];
                for (int j = 0; j < np; j += VL) {
                    vec before = load(later + j), here = {};
                    for (int l = (length - 1) * np + j; l >= 0; l -= np) {
                        here += load(w.x + l) * load(u + l);
                        vec d_log = load(w.c + l) * (load(dc + l) - (before + here));
                        store(dc + l, d_log), store(u + l, -d_log);
                    }
                    store(later + j, here);
                }
                for (int j = 0; j < np; j++) carried[j] = (carried[j] + later[j]) * w.shrink[j];
            } else
                for (int i = length - 1; i >= 0; i--)
                    for (int j = 0; j < np; j += VL) {
                        int l = i * np + j;
                        store(u + l, load(u + l) - load(w.c + l) * load(dc + l));
                        store(dc + l, load(dc + l) * load(w.inverse + l));
                    }
            // The sum of N8 is exp(log_decay_j) times an effect on later queries. Where that factor is nothing, so is the sum;
            // what rounding has left of it would be noise, here and for all earlier tokens. In a mean (N9) no factor is nothing:
            // what enters may be as small.
            if (w.ld) {
                const bool alike = a->mean && a->decay_width == 1;
                const float *decays = alike ? nullptr : padded(length, n, w.ld + from * n, y, np, 0.0f);
                double *so_far = a->mean ? rest : carried;
                float *still = w.next;  // 0 where later chunks have nothing to do with what was before this one
                for (int j = 0; j < np; j++) later[j] = (float)so_far[j];
                for (int j = 0; j < np; j += VL) {
                    vec before = load(later + j), here = {}, stays = splat(1.0f);
                    for (int i = length - 1; i >= 0; i--) {
                        const int l = i * np + j;
                        vec decay = alike ? splat(w.ld[from + i]) : load(decays + l);
                        ivec kept = decay > splat(a->mean ? -INFINITY : GONE);
                        here = kept ? here + load(u + l) : (vec){};
                        before = kept ? before : (vec){}, stays = kept ? stays : (vec){};
                        vec effect = before + here;
                        if (a->mean && !alike) effect -= load(dc + l) * odds(decay);
                        store(u + l, effect);
                    }
                    store(later + j, here), store(still + j, stays);
                }
                for (int j = 0; j < np; j++) so_far[j] = so_far[j] * still[j] + later[j];
                for (int i = 0; i < length; i++) {
                    if (!alike) {
                        memcpy(a->d_log_decay + (at + i) * n, u + i * np, n * 4);
                        continue;
                    }
                    double all = 0, entered = 0;
                    for (int j = 0; j < n; j++) all += u[i * np + j], entered += dc[i * np + j];
                    a->d_log_decay[at + i] = (float)(all - entered * odds(splat(w.ld[from + i]))[0]);
                }
            }
            for (int i = 0; a->phi && i < length; i++) memcpy(a->d_phi + (at + i) * n, dc + i * np, n * 4);
            d_memory.scale(w, w.shrink);  // now the gradient of the sums before the chunk
        }
        d_memory.scale(w, unscale);
        for (int i = 0; a->mean && i < n; i++) carried[i] *= unscale[i];
    }
    // 6. To the running sum that was passed in
    if (a->mean) {
        load_checkpoint(w, s, a->checkpoints + row * spans * carry_floats(w));
        for (int i = 0; i < n; i++) {
            const double effect = d_memory.effect(w, i, s.plain, dp, 1, s.transposed, 1, np, s.mass[i]) * s.scale[i];
            a->d_log_total[row * n + i] = s.total[i] == 0 ? 0.0 : effect - carried[i];
        }
    }
    d_memory.store_gradient(w, row);
}

// Not causal: first the queries, then the tokens. Token j has the share phi_j = exp(logit_j - log_total) of its slot (eq. 7).
static void backward_whole(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.begin(a, row, scratch);
    const int n = w.n, d = w.d, e = w.e, np = w.np, dp = w.dp, ep = w.ep, chunk = w.chunk;
    const float *mk = a->memory_k + row * n * d, *mv = a->memory_v + row * n * e;
    float *qb = w.take(chunk * dp), *gb = w.take(chunk * ep), *scores = w.take(chunk * np);
    float *y = w.take(chunk * np), *z = w.take(chunk * np), *dqb = w.take(chunk * dp), *dvb = w.take(chunk * ep);
    float *K = w.take(np * dp), *V = w.take(np * ep), *vt = w.take(ep * np), *dkt = w.take(dp * np), *dvt = w.take(ep * np);
    float *total = w.take(np), *rest = w.take(np), *effects = w.take(np);
    copy_rows(n, d, mk, K, dp), copy_rows(n, e, mv, V, ep);
    memset(K + n * dp, 0, (size_t)(np - n) * dp * 4), memset(V + n * ep, 0, (size_t)(np - n) * ep * 4);
    transpose(np, ep, V, ep, vt, np);
    MemoryGradient d_memory;
    d_memory.load_gradient(w, row);
    // 1. Back through the reads, a chunk of queries at a time: d_q and the gradient of the memory
    for (int64_t group = 0; group < a->g; group++)
        for (int64_t from = 0; from < a->queries; from += chunk) {
            const int length = (int)(a->queries - from < chunk ? a->queries - from : chunk);
            const int64_t at = (row * a->g + group) * a->queries + from;
            const float *qs = padded(length, d, w.q + (group * a->queries + from) * d, qb, dp, 0.0f);
            const float *gs = padded(length, e, a->d_out + at * e, gb, ep, 0.0f);
            product(length, np, e, gs, ep, 1, vt, np, y, np);
            const float *found = w.recompute_weights(length, a->scores + at * n, a->lse + at, scores, z);
            w.softmax_backward(length, found, z, y, nullptr, nullptr, a->d_lse ? a->d_lse + at : nullptr);
            float *to = d == dp ? a->d_q + at * d : dqb;
            product(length, dp, n, y, np, 1, K, dp, to, dp);
            product<true>(n, dp, length, y, 1, np, qs, dp, d_memory.k, dp);
            product<true>(n, ep, length, z, 1, np, gs, ep, d_memory.v, ep);
            for (int i = 0; to == dqb && i < length; i++) memcpy(a->d_q + (at + i) * d, dqb + i * dp, d * 4);
        }
    // 2. log_total in two floats, for it may need more than 24 bits; `effects`: what log_total does to the memory
    for (int i = 0; i < np; i++) {
        const double logarithm = i < n && a->log_total[row * n + i] > -INFINITY ? a->log_total[row * n + i] : 0.0;
        total[i] = (float)logarithm, rest[i] = (float)(logarithm - total[i]);
        effects[i] = 0;
        if (i < n)
            effects[i] =
                (float)(d_memory.effect(w, i, mk, d, 1, mv, e, 1, a->mass[row * n + i]) - a->d_log_total[row * n + i]);
    }
    // 3. To the tokens: d logit = phi (d_memory . [k, v, 1] - effects), d_k and d_v = phi d_memory
    transpose(np, dp, d_memory.k, dp, dkt, np);
    transpose(np, ep, d_memory.v, ep, dvt, np);
    for (int64_t from = 0; from < a->t; from += chunk) {
        const int length = (int)(a->t - from < chunk ? a->t - from : chunk);
        const int64_t at = row * a->t + from;
        w.tokens(from, length);
        product(length, np, d, w.keys, dp, 1, dkt, np, y, np);
        product<true>(length, np, e, w.values, ep, 1, dvt, np, y, np);
        const float *logs = padded(length, n, w.phi + from * n, z, np, -INFINITY);
        for (int i = 0; i < length; i++)
            for (int j = 0; j < np; j += VL) {
                int l = i * np + j;
                vec share = vexp(load(logs + l) - load(total + j) - load(rest + j));
                store(y + l, share * (load(y + l) + load(d_memory.mass + j) - load(effects + j)));
                store(z + l, share);
            }
        float *dk = d == dp ? a->d_k + at * d : dqb, *dv = e == ep ? a->d_v + at * e : dvb;
        product(length, dp, n, z, np, 1, d_memory.k, dp, dk, dp);
        product(length, ep, n, z, np, 1, d_memory.v, ep, dv, ep);
        for (int i = 0; i < length; i++) {
            memcpy(a->d_phi + (at + i) * n, y + i * np, n * 4);
            if (dk == dqb) memcpy(a->d_k + (at + i) * d, dqb + i * dp, d * 4);
            if (dv == dvb) memcpy(a->d_v + (at + i) * e, dvb + i * ep, e * 4);
        }
    }
    // 4. To the memory that was passed in, whose share of the slot is exp(old_total - log_total)
    for (int i = 0; i < n; i++) {
        const int64_t slot = row * n + i;
        const double before = a->old_total[slot], after = a->log_total[slot];
        total[i] = before == -INFINITY ? 0.0f : (float)exp(before - after);
        const double effect =
            d_memory.effect(w, i, a->old_k + row * n * d, d, 1, a->old_v + row * n * e, e, 1, a->old_mass[slot]);
        a->d_log_total[slot] = total[i] * (effect - effects[i]);
    }
    d_memory.scale(w, total);
    d_memory.store_gradient(w, row);
}
