// The gradients of a pass over a row of tokens, causal or not.

// Gradients of the memory: dK (np x dp), dV (np x ep), of its mass, and what scaling it would do.
struct Slope {
    float *k, *v, *mass;

    void enter(Row &w, int64_t row) {
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

    // What scaling slot i would do. Its keys and values stand `k_row` apart from the next slot's, and `k_step` apart.
    double effect(const Row &w, int i, const float *mk, int k_row, int k_step, const float *mv, int v_row, int v_step,
                  float m) const {
        double dot = (double)mass[i] * m;
        for (int j = 0; j < w.d; j++) dot += (double)k[i * w.dp + j] * mk[i * k_row + j * k_step];
        for (int j = 0; j < w.e; j++) dot += (double)v[i * w.ep + j] * mv[i * v_row + j * v_step];
        return dot;
    }

    void leave(const Row &w, int64_t row) const {
        for (int i = 0; i < w.n; i++) {
            const int64_t slot = row * w.n + i;
            if (w.d) memcpy(w.a->d_memory_k + slot * w.d, k + i * w.dp, w.d * 4);
            memcpy(w.a->d_memory_v + slot * w.e, v + i * w.ep, w.e * 4);
            w.a->d_mass[slot] = mass[i];
        }
    }
};

// `length x width` transposed; the rows that a short piece lacks may hold anything, but not lie outside the tensor.
static void turn(int piece, int length, int width, const float *from, float *room, float *to) {
    if (length < piece && from != room && width) memcpy(room, from, (size_t)length * width * 4), from = room;
    transpose(piece, width, from, width, to, piece);
}

static inline void lower(float *p, int length, int piece) {  // zero above the diagonal
    ivec column;
    for (int l = 0; l < VL; l++) column[l] = l;
    for (int i = 0; i < length; i++)
        for (int j = 0; j < piece; j += VL) {
            vec kept = load(p + i * piece + j);
            store(p + i * piece + j, column + j <= i - (ivec){} ? kept : (vec){});
        }
}

// The gradients, piece by piece from the last to the first. With S the scores, p the read weights, and for every query
//     dp_tn = d_out_t . V_tn,   dS = p (dp - sum p dp),   u = dS S + p dp   (what scaling slot n's memory at t would do)
// the gradient of a token's share is that of its row in K and V; that of the running sum is -u, that of the decays the
// sum of u - phi d_phi over later tokens. The sums at the pieces' starts are recomputed from the checkpoints.
static void backward_row(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.begin(a, row, scratch);
    Carry s;
    w.take_carry(s);
    const int n = w.n, d = w.d, e = w.e, np = w.np, dp = w.dp, ep = w.ep, piece = w.piece;
    const int64_t t = a->t, segments = (t + SEGMENT - 1) / SEGMENT;
    const size_t sums = sums_floats(w);
    float *qb = w.take(piece * dp), *gb = w.take(piece * ep), *vT = w.take(ep * piece);
    float *kT = w.take(dp * piece), *cT = w.take(np * piece);
    float *scores = w.take(piece * np), *y = w.take(piece * np), *z = w.take(piece * np), *u = w.take(piece * np);
    float *dc = w.take(piece * np), *later = w.take(np), *unscale = w.take(np), *den = w.take(piece);
    float *pairs = w.take(piece * piece), *outer = w.take(piece * piece), *mix = w.take(piece * piece);
    float *dqb = w.take(piece * dp), *dkb = w.take(piece * dp), *dvb = w.take(piece * ep);
    float *dcT = w.take(np * piece);
    double *carried = (double *)w.take(2 * np);  // running mean: u / A over later tokens; decays: u - phi d_phi
    Slope slope;
    slope.enter(w, row);
    float *starts = w.take(SEGMENT * sums);
    for (int64_t segment = segments - 1; segment >= 0; segment--) {
        // Once more forward through the segment, noting where each piece starts and from what.
        const int64_t first = segment * SEGMENT, stop = first + SEGMENT < t ? first + SEGMENT : t;
        int64_t begins[SEGMENT];
        int lengths[SEGMENT], pieces = 0;
        recall(w, s, a->checkpoints + (row * segments + segment) * carry_floats(w));
        for (int i = 0; i < np; i++) unscale[i] = s.scale[i] == 0 ? 0 : 1 / s.scale[i];
        for (int64_t from = first; from < stop;) {
            for (int64_t end = from + piece < stop ? from + piece : stop, length; from < end; from += length) {
                w.piece_at(from - first);
                length = w.length_of_piece(s, from, end - from);
                begins[pieces] = from, lengths[pieces] = length;
                w.coefficients(s, from, length);
                float *to = starts + pieces++ * sums;
                memcpy(to, s.plain, np * dp * 4), memcpy(to + np * dp, s.turned, ep * np * 4);
                memcpy(to + np * dp + ep * np, s.mass, np * 4);
                w.tokens(from, length);
                if (from + length < stop || segment == segments - 1)
                    w.advance_turned(s, length), w.advance_plain(s, length);
            }
        }
        if (segment == segments - 1)
            for (int i = 0; i < np; i++) {
                carried[i] = 0;
                if (i >= n) continue;
                carried[i] = slope.effect(w, i, s.plain, dp, 1, s.turned, 1, np, s.mass[i]) * s.scale[i];
                if (a->mean) carried[i] -= a->d_log_total[row * n + i];
            }
        // Between segments the gradients are of the memory; inside, of the sums, whose scale each pass chooses by itself.
        slope.scale(w, s.scale);
        for (int i = 0; a->mean && i < n; i++) carried[i] *= s.scale[i];
        while (pieces--) {
            const int64_t from = begins[pieces];
            const int length = lengths[pieces];
            w.piece_at(from - first);
            const float *K = starts + pieces * sums, *vt = K + np * dp, *mass = vt + ep * np;
            w.tokens(from, length);
            turn(piece, length, dp, w.keys, w.kb, kT);
            turn(piece, length, ep, w.values, w.vb, vT);
            transpose(piece, np, w.c, np, cT, piece);
            // Through the sums after the piece.
            float *dk = d == dp ? a->d_k + (row * t + from) * d : dkb, *dv = e == ep ? a->d_v + (row * t + from) * e : dvb;
            product(n, piece, e, slope.v, ep, 1, vT, piece, dcT, piece);
            product<true>(n, piece, d, slope.k, dp, 1, kT, piece, dcT, piece);
            transpose(np, piece, dcT, piece, dc, np);
            product(length, ep, n, w.c, np, 1, slope.v, ep, dv, ep);
            product(length, dp, n, w.c, np, 1, slope.k, dp, dk, dp);
            for (int i = 0; i < length; i++)
                for (int j = 0; j < np; j += VL) {
                    store(dc + i * np + j, load(dc + i * np + j) + load(slope.mass + j));
                    store(u + i * np + j, (vec){});
                }
            for (int64_t group = 0; group < a->g; group++) {
                const int64_t at = (row * a->g + group) * t + from;
                const float *qs = a->linear ? padded(length, n, w.q + (group * t + from) * n, scores, np, 0.0f)
                                            : padded(length, d, w.q + (group * t + from) * d, qb, dp, 0.0f);
                const float *gs = padded(length, e, a->d_out + at * e, gb, ep, 0.0f);
                product(length, np, e, gs, ep, 1, vt, np, y, np);
                product<false, CORNER>(length, piece, e, gs, ep, 1, vT, piece, outer, piece);
                lower(outer, length, piece);
                product<true, LOWER>(length, np, length, outer, piece, 1, w.c, np, y, np);
                if (a->linear) {
                    // o = f V / den: the denominator is one more column of V, the constant 1.
                    features(w, mass, length, qs, z, den);
                    for (int i = 0; i < length; i++) {
                        for (int j = 0; j < np; j += VL) store(z + i * np + j, over(load(z + i * np + j), den[i]));
                        vec numerator = {};
                        for (int j = 0; j < np; j += VL) numerator += load(z + i * np + j) * load(y + i * np + j);
                        const float minus = a->floor && den[i] == a->floor ? 0.0f : -sum(numerator);  // a floor is constant
                        for (int j = 0; j < np; j += VL) {
                            int l = i * np + j;
                            vec ones = load(mass + j) + load(w.cumulative + l);
                            vec both = load(y + l) + ones * minus;
                            vec back = over(both * load(w.x + l), den[i]);
                            if (w.masked()) back = load(w.allow + l) == (vec){} ? back : (vec){};
                            store(u + l, load(u + l) + load(z + l) * both);
                            store(y + l, back);
                            store(slope.mass + j, load(slope.mass + j) + load(z + l) * minus);
                        }
                        memcpy(a->d_q + (at + i) * n, y + i * np, n * 4);
                        for (int j = 0; j <= i; j++) outer[i * piece + j] += minus;
                    }
                } else {
                    const float *found = w.recover(length, a->scores + at * n, a->lse + at, scores, z);
                    w.back(length, found, z, y, w.x, u, a->d_lse ? a->d_lse + at : nullptr);
                }
                product<true>(n, ep, length, z, 1, np, gs, ep, slope.v, ep);
                product<false, CORNER>(length, piece, n, z, np, 1, cT, piece, mix, piece);
                lower(mix, length, piece);
                product<true, UPPER>(length, ep, length, mix, 1, piece, gs, ep, dv, ep);
                product<true, UPPER>(length, np, length, outer, 1, piece, z, np, dc, np);
                if (a->linear) continue;
                product<false, CORNER>(length, piece, d, qs, dp, 1, kT, piece, pairs, piece);
                lower(pairs, length, piece);
                product<true, UPPER>(length, np, length, pairs, 1, piece, y, np, dc, np);
                float *to = d == dp ? a->d_q + at * d : dqb;
                product(length, dp, n, y, np, 1, K, dp, to, dp);
                product<true>(n, dp, length, y, 1, np, qs, dp, slope.k, dp);
                product<false, CORNER>(length, piece, n, y, np, 1, cT, piece, mix, piece);
                lower(mix, length, piece);
                product<true, LOWER>(length, dp, length, mix, piece, 1, w.keys, dp, to, dp);
                product<true, UPPER>(length, dp, length, mix, 1, piece, qs, dp, dk, dp);
                for (int i = 0; to == dqb && i < length; i++) memcpy(a->d_q + (at + i) * d, dqb + i * dp, d * 4);
            }
            const int64_t at = row * t + from;
            for (int i = 0; i < length; i++) {
                if (dk == dkb) memcpy(a->d_k + (at + i) * d, dkb + i * dp, d * 4);
                if (dv == dvb) memcpy(a->d_v + (at + i) * e, dvb + i * ep, e * 4);
            }
            // To the shares.
            if (a->mean) {
                for (int j = 0; j < np; j++) later[j] = (float)carried[j];
                for (int j = 0; j < np; j += VL) {
                    vec before = load(later + j), here = {};
                    for (int l = (length - 1) * np + j; l >= 0; l -= np) {
                        here += load(w.x + l) * load(u + l);
                        store(dc + l, load(w.c + l) * (load(dc + l) - (before + here)));
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
            for (int i = length - 1; w.ld && i >= 0; i--)
                for (int j = 0; j < n; j++) {
                    carried[j] += u[i * np + j];
                    const size_t at_slot = (from + i) * n + j;
                    a->d_log_decay[row * t * n + at_slot] = w.ld[at_slot] == -INFINITY ? 0.0f : (float)carried[j];
                }
            for (int i = 0; i < length; i++) memcpy(a->d_phi + (at + i) * n, dc + i * np, n * 4);
            slope.scale(w, w.shrink);  // from here on the gradients are of the sums before the piece
        }
        slope.scale(w, unscale);
        for (int i = 0; a->mean && i < n; i++) carried[i] *= unscale[i];
    }
    if (a->mean) {
        recall(w, s, a->checkpoints + row * segments * carry_floats(w));
        for (int i = 0; i < n; i++) {
            const double effect = slope.effect(w, i, s.plain, dp, 1, s.turned, 1, np, s.mass[i]) * s.scale[i];
            a->d_log_total[row * n + i] = s.total[i] == 0 ? 0.0 : effect - carried[i];
        }
    }
    slope.leave(w, row);
}

// ... and where the pass was not causal: the queries first, then the tokens, each of which had the share
// exp(logit - log_total) of its slot.
static void backward_whole(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.begin(a, row, scratch);
    const int n = w.n, d = w.d, e = w.e, np = w.np, dp = w.dp, ep = w.ep, piece = w.piece;
    const float *mk = a->memory_k + row * n * d, *mv = a->memory_v + row * n * e;
    float *qb = w.take(piece * dp), *gb = w.take(piece * ep), *scores = w.take(piece * np);
    float *y = w.take(piece * np), *z = w.take(piece * np), *dqb = w.take(piece * dp), *dvb = w.take(piece * ep);
    float *K = w.take(np * dp), *V = w.take(np * ep), *vt = w.take(ep * np), *dkt = w.take(dp * np), *dvt = w.take(ep * np);
    float *total = w.take(np), *rest = w.take(np), *effects = w.take(np);
    copy_rows(n, d, mk, K, dp), copy_rows(n, e, mv, V, ep);
    memset(K + n * dp, 0, (size_t)(np - n) * dp * 4), memset(V + n * ep, 0, (size_t)(np - n) * ep * 4);
    transpose(np, ep, V, ep, vt, np);
    Slope slope;
    slope.enter(w, row);
    for (int64_t group = 0; group < a->g; group++)
        for (int64_t from = 0; from < a->queries; from += piece) {
            const int length = (int)(a->queries - from < piece ? a->queries - from : piece);
            const int64_t at = (row * a->g + group) * a->queries + from;
            const float *qs = padded(length, d, w.q + (group * a->queries + from) * d, qb, dp, 0.0f);
            const float *gs = padded(length, e, a->d_out + at * e, gb, ep, 0.0f);
            product(length, np, e, gs, ep, 1, vt, np, y, np);
            const float *found = w.recover(length, a->scores + at * n, a->lse + at, scores, z);
            w.back(length, found, z, y, nullptr, nullptr, a->d_lse ? a->d_lse + at : nullptr);
            float *to = d == dp ? a->d_q + at * d : dqb;
            product(length, dp, n, y, np, 1, K, dp, to, dp);
            product<true>(n, dp, length, y, 1, np, qs, dp, slope.k, dp);
            product<true>(n, ep, length, z, 1, np, gs, ep, slope.v, ep);
            for (int i = 0; to == dqb && i < length; i++) memcpy(a->d_q + (at + i) * d, dqb + i * dp, d * 4);
        }
    for (int i = 0; i < np; i++) {
        const double logarithm = i < n && a->log_total[row * n + i] > -INFINITY ? a->log_total[row * n + i] : 0.0;
        total[i] = (float)logarithm, rest[i] = (float)(logarithm - total[i]);
        effects[i] = 0;
        if (i < n) effects[i] = (float)(slope.effect(w, i, mk, d, 1, mv, e, 1, a->mass[row * n + i]) - a->d_log_total[row * n + i]);
    }
    transpose(np, dp, slope.k, dp, dkt, np);
    transpose(np, ep, slope.v, ep, dvt, np);
    for (int64_t from = 0; from < a->t; from += piece) {
        const int length = (int)(a->t - from < piece ? a->t - from : piece);
        const int64_t at = row * a->t + from;
        w.tokens(from, length);
        product(length, np, d, w.keys, dp, 1, dkt, np, y, np);
        product<true>(length, np, e, w.values, ep, 1, dvt, np, y, np);
        const float *logs = padded(length, n, w.phi + from * n, z, np, -INFINITY);
        for (int i = 0; i < length; i++)
            for (int j = 0; j < np; j += VL) {
                int l = i * np + j;
                vec share = vexp(load(logs + l) - load(total + j) - load(rest + j));
                store(y + l, share * (load(y + l) + load(slope.mass + j) - load(effects + j)));
                store(z + l, share);
            }
        float *dk = d == dp ? a->d_k + at * d : dqb, *dv = e == ep ? a->d_v + at * e : dvb;
        product(length, dp, n, z, np, 1, slope.k, dp, dk, dp);
        product(length, ep, n, z, np, 1, slope.v, ep, dv, ep);
        for (int i = 0; i < length; i++) {
            memcpy(a->d_phi + (at + i) * n, y + i * np, n * 4);
            if (dk == dqb) memcpy(a->d_k + (at + i) * d, dqb + i * dp, d * 4);
            if (dv == dvb) memcpy(a->d_v + (at + i) * e, dvb + i * ep, e * 4);
        }
    }
    for (int i = 0; i < n; i++) {  // what was there before had its share too
        const int64_t slot = row * n + i;
        const double before = a->old_total[slot], after = a->log_total[slot];
        total[i] = before == -INFINITY ? 0.0f : (float)exp(before - after);
        const double effect = slope.effect(w, i, a->old_k + row * n * d, d, 1, a->old_v + row * n * e, e, 1, a->old_mass[slot]);
        a->d_log_total[slot] = total[i] * (effect - effects[i]);
    }
    slope.scale(w, total);
    slope.leave(w, row);
}
