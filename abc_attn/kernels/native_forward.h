// One pass of the bounded memory over a row of tokens, and the pieces that both directions are made of.
//
// Tokens are taken in pieces. In a piece that starts from the sums S (of keys, values and the constant 1) query t reads
//
//     K_tn = x_tn (S_n + sum_{j <= t} c_jn k_j)          (V and mass alike)
//
// which covers both ways of writing:
//     running mean of log-weights s (A the running sum):  c_j = exp(s_j - top),   x_t = exp(top) / A_t
//     phi and log_decay (L their sum after the first):    c_j = phi_j exp(-L_j),  x_t = exp(L_t)
// so inside a piece tokens are only added to the sums, and nothing is divided but once for each query and slot. Forward, tokens add to the
// sums and read them one after the other (`Recurrence`); backward, a piece is a handful of small products of matrices. It is
// 16 or 32 tokens where the range of exponents inside it is small, and fewer, if need be one, where not: exact either way.

// What passes from piece to piece: sums S, of which the memory is `scale` times.
// One of keys and values is held transposed, as the products need it: keys in the forward pass, values in the backward.
struct Carry {
    bool values_turned;
    float *turned, *plain, *mass;  // width x np, np x width, np
    float *scale;                  // np
    float *top;                    // np   running mean: total * exp(top) is the running sum
    double *total;
};

// One row's view of the arguments, and room for one piece (backward: for the pieces of a segment).
struct Row {
    const Args *a;
    int n, d, e, np, dp, ep, piece;
    const float *q, *k, *v, *phi, *ld;
    const uint8_t *readable;
    uint8_t *used;
    float *room;  // scratch, handed out by `take`
    size_t taken;
    const float *keys, *values;  // of the piece
    float *next, *before, *sums, *best, *total, *kb, *vb;
    float *first_c;
    size_t kept_rows;
    float *shrink, *x, *c, *inverse, *allow, *cumulative;  // of the piece, in `kept_rows` rows for each

    float *take(size_t count) {
        float *p = room + taken;
        taken += (count + 15) & ~(size_t)15;
        return p;
    }

    void sizes(const Args *args) {
        a = args;
        n = a->n, d = a->d, e = a->e;
        // Short pieces stay in the nearest cache; where they are products, longer ones cost less.
        piece = a->causal && !a->backward ? 16 : 32;
        np = (n + VL - 1) / VL * VL, dp = (d + VL - 1) / VL * VL, ep = (e + VL - 1) / VL * VL;
    }

    void begin(const Args *args, int64_t row, float *scratch) {
        sizes(args);
        int64_t t = a->t;
        q = a->q + row * a->g * a->queries * (a->linear ? n : d);
        k = a->k + row * t * d, v = a->v + row * t * e, phi = a->phi + row * t * n;
        ld = a->log_decay ? a->log_decay + row * t * n : nullptr;
        readable = a->readable ? a->readable + row * t * n : nullptr;
        used = nullptr;
        room = scratch, taken = 0;
        next = take(np), before = take(np), sums = take(np), best = take(piece), total = take(piece);
        kb = take(piece * dp), vb = take(piece * ep);
        kept_rows = a->backward ? SEGMENT : piece;
        first_c = take(6 * kept_rows * np);
        piece_at(0);
    }

    // The piece that starts `offset` tokens into what is kept.
    void piece_at(int64_t offset) {
        size_t stride = kept_rows * np;
        c = first_c + offset * np, x = c + stride, shrink = x + stride;
        inverse = shrink + stride, allow = inverse + stride, cumulative = allow + stride;
    }

    void take_carry(Carry &s) {
        s.values_turned = a->backward;
        s.turned = take((s.values_turned ? ep : dp) * np), s.plain = take(np * (s.values_turned ? dp : ep));
        s.mass = take(np), s.scale = take(np), s.top = take(np), s.total = (double *)take(2 * np);
    }

    bool masked() const { return a->mask_empty || readable || np != n; }

    bool still_used(size_t at, int slot) const {
        if (a->mean) return used[slot] || phi[at] > -INFINITY;
        return (used[slot] && !(ld && ld[at] == -INFINITY)) || phi[at] != 0;
    }

    // After the last token: what happened to the slot last decides.
    bool used_after(int slot) const {
        for (int64_t at = a->t * n - n + slot; at >= 0; at -= n) {
            if (a->mean ? phi[at] > -INFINITY : phi[at] != 0) return true;
            if (ld && ld[at] == -INFINITY) return false;
        }
        return used[slot];
    }

    // How many of the next `room` tokens can be one piece.
    int length_of_piece(const Carry &s, int64_t from, int room) {
        if (a->mean) return tops(s, from, room) ? room : 1;
        if (!ld) return room;
        for (int j = 0; j < n; j++) x[j] = 0;
        for (int i = 1; i < room; i++) {
            bool wide = false;
            for (int j = 0; j < n; j++) x[j] += ld[(from + i) * n + j], wide |= !(x[j] >= -16.0f);
            if (wide) return i;
        }
        return room;
    }

    // A running mean: finds the `next` top of a piece, and whether that is near enough to all its weights.
    // A top stays until a weight is e^8 above it, so that the sums are seldom rescaled.
    bool tops(const Carry &s, int64_t from, int length) {
        const float *logs = padded(length, n, phi + from * n, c, np, -INFINITY);
        ivec wide = {};
        for (int j = 0; j < np; j += VL) {
            vec top = load(s.top + j), first = load(logs + j), peak = first;
            for (int i = 1; i < length; i++) peak = vmax(peak, load(logs + i * np + j));
            vec moved = peak > top + 8.0f ? peak : top;
            store(next + j, moved);
            // not <=: a NaN, where the first is -inf and others are not, counts as wide
            wide |= ~(moved - vmax(top, first) <= splat(30.0f)) & (moved != splat(-INFINITY));
        }
        int any = 0;
        for (int l = 0; l < VL; l++) any |= wide[l];
        return !any;
    }

    // c and x of a piece, and what its read may see; the carry is brought to the piece's scale.
    void coefficients(Carry &s, int64_t from, int length) {
        if (a->mean) {
            if (length == 1) tops(s, from, 1);
            mean_coefficients(s, from, length);
        } else
            decay_coefficients(s, from, length);
        memcpy(s.scale, x + (length - 1) * np, np * sizeof(float));
        rescale(s);
        if (masked() && a->causal) visible(from, length);
        if (a->linear)
            for (int j = 0; j < np; j += VL) {
                vec sum = {};
                for (int i = 0; i < length; i++) sum += load(c + i * np + j), store(cumulative + i * np + j, sum);
            }
    }

    void mean_coefficients(Carry &s, int64_t from, int length) {
        const vec zero = {}, one = splat(1.0f);
        const float *logs = padded(length, n, phi + from * n, c, np, -INFINITY);
        for (int j = 0; j < np; j += VL) {
            vec old = load(s.top + j), top = load(next + j);
            store(shrink + j, old == top ? one : vexp(old - (top == splat(-INFINITY) ? zero : top)));
            store(s.top + j, top);
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

    void rescale(Carry &s) const {
        bool same = true;
        for (int j = 0; j < np; j++) same &= shrink[j] == 1.0f;
        if (same) return;
        for (int i = 0; i < (s.values_turned ? e : d); i++)
            for (int j = 0; j < np; j += VL) store(s.turned + i * np + j, load(s.turned + i * np + j) * load(shrink + j));
        scale_rows(s.plain, s.values_turned ? dp : ep, shrink);
        for (int j = 0; j < np; j += VL) store(s.mass + j, load(s.mass + j) * load(shrink + j));
    }

    void scale_rows(float *rows, int width, const float *by) const {
        for (int i = 0; i < n; i++)
            for (int j = 0; j < width; j += VL) store(rows + i * width + j, load(rows + i * width + j) * by[i]);
    }

    void visible(int64_t from, int length) {
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

    void tokens(int64_t from, int length) {
        keys = padded(length, d, k + from * d, kb, dp, 0.0f);
        values = padded(length, e, v + from * e, vb, ep, 0.0f);
    }

    // The sums after the piece: of what is held transposed, and of the rest.
    template <class Between = Nothing>
    void advance_turned(Carry &s, int length, Between &&between = {}) const {
        const bool v = s.values_turned;
        product<true>(v ? e : d, np, length, v ? values : keys, 1, v ? ep : dp, c, np, s.turned, np, between);
    }

    template <class Between = Nothing>
    void advance_plain(Carry &s, int length, Between &&between = {}) const {
        const int width = s.values_turned ? dp : ep;
        product<true>(n, width, length, c, 1, np, s.values_turned ? keys : values, width, s.plain, width, between);
        advance_mass(s, length);
    }

    void advance_mass(Carry &s, int length) const {
        for (int j = 0; j < np; j += VL) {
            vec sum = load(s.mass + j);
            for (int i = 0; i < length; i++) sum += load(c + i * np + j);
            store(s.mass + j, sum);
        }
    }

    void enter(Carry &s, const float *mk, const float *mv, const float *mass, const double *log_total) const {
        memset(s.turned, 0, dp * np * sizeof(float));
        memset(s.plain, 0, np * ep * sizeof(float));
        for (int i = 0; i < np; i++) {
            const bool real = i < n;
            const double logarithm = real && log_total ? log_total[i] : -INFINITY;
            s.top[i] = (float)logarithm;
            s.total[i] = logarithm == -INFINITY ? 0.0 : exp(logarithm - (double)s.top[i]);
            const float by = log_total ? (float)s.total[i] : 1.0f;
            s.scale[i] = by == 0 ? 0 : 1 / by, s.mass[i] = 0.0f;
            if (!real || by == 0) continue;  // nothing was ever written
            s.mass[i] = mass[i] * by;
            for (int j = 0; j < d; j++) s.turned[j * np + i] = mk[i * d + j] * by;
            for (int j = 0; j < e; j++) s.plain[i * ep + j] = mv[i * e + j] * by;
        }
    }

    // The memory after the last token.
    void leave(const Carry &s, int64_t row) const {
        for (int i = 0; i < n; i++) {
            const int64_t slot = row * n + i;
            for (int j = 0; j < d; j++) a->memory_k[slot * d + j] = s.turned[j * np + i] * s.scale[i];
            for (int j = 0; j < e; j++) a->memory_v[slot * e + j] = s.plain[i * ep + j] * s.scale[i];
            a->mass[slot] = s.mass[i] * s.scale[i];
            if (a->mean) a->log_total[slot] = s.total[i] == 0 ? -INFINITY : (double)s.top[i] + log(s.total[i]);
        }
    }

    // p, the softmax of the scores x z: z becomes p x. `x` and `allow` may be null: ones, all visible.
    void weigh(int length, float *z, const float *x, const float *allow, float *scores, float *lse) const {
        for (int i = 0; i < length; i += 16)
            weigh_rows(length - i < 16 ? length - i : 16, z + i * np, x ? x + i * np : nullptr, allow ? allow + i * np : nullptr,
                       scores ? scores + (int64_t)i * n : nullptr, lse ? lse + i : nullptr);
    }

    // Step by step over rows that are near: in no step does one wait for another.
    void weigh_rows(int length, float *z, const float *x, const float *allow, float *scores, float *lse) const {
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

    template <int J>  // vectors in a row, which are then unrolled; 0: any number
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
                vec weight = vexp(load(at) - best[i]);
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

    // p again, from what the forward pass kept. Returns the scores in whole vectors.
    const float *recover(int length, const float *kept, const float *lse, float *room, float *weights) const {
        const float *scores = padded(length, n, kept, room, np, -INFINITY);
        for (int i = 0; i < length; i++) {
            const float against = lse[i] == -INFINITY ? 0 : lse[i];
            for (int j = 0; j < np; j += VL) store(weights + i * np + j, vexp(load(scores + i * np + j) - against));
        }
        return scores;
    }

    // Gradients of the scores, from p and dp (in z and y): z = p x, y = d score x scale; u takes what scaling a slot's
    // memory would do.
    void back(int length, const float *scores, float *z, float *y, const float *x, float *u, const float *d_lse) const {
        for (int i = 0; i < length; i++, z += np, y += np, scores += np) {
            vec dot = {};
            for (int j = 0; j < np; j += VL) {
                vec d_weight = x ? load(y + j) * load(x + i * np + j) : load(y + j);
                store(y + j, d_weight);
                dot += load(z + j) * d_weight;
            }
            const float mean = sum(dot) - (d_lse ? d_lse[i] : 0);
            for (int j = 0; j < np; j += VL) {
                vec weight = load(z + j), d_weight = load(y + j), slope = weight * (d_weight - mean);
                if (!x) {
                    store(y + j, slope * a->scale);
                    continue;
                }
                vec effect = weight == (vec){} ? (vec){} : slope * load(scores + j) + weight * d_weight;
                vec share = load(x + i * np + j);
                store(u + i * np + j, load(u + i * np + j) + effect);
                store(y + j, slope * a->scale * share);
                store(z + j, weight * share);
            }
        }
    }
};

// A checkpoint holds the carry of the forward pass as it is.
static size_t sums_floats(const Row &w) { return (size_t)w.dp * w.np + (size_t)w.np * w.ep + w.np; }
static size_t carry_floats(const Row &w) { return sums_floats(w) + 4 * w.np; }

static void keep(const Row &w, const Carry &s, float *to) {
    memcpy(to, s.turned, w.dp * w.np * 4), to += w.dp * w.np;
    memcpy(to, s.plain, w.np * w.ep * 4), to += w.np * w.ep;
    memcpy(to, s.mass, w.np * 4), to += w.np;
    memcpy(to, s.scale, w.np * 4), to += w.np;
    memcpy(to, s.top, w.np * 4), to += w.np;
    memcpy(to, s.total, w.np * 8);
}

static void recall(const Row &w, Carry &s, const float *from) {
    transpose(w.dp, w.np, from, w.np, s.plain, w.dp), from += w.dp * w.np;
    transpose(w.np, w.ep, from, w.ep, s.turned, w.np), from += w.np * w.ep;
    memcpy(s.mass, from, w.np * 4), from += w.np;
    memcpy(s.scale, from, w.np * 4), from += w.np;
    memcpy(s.top, from, w.np * 4), from += w.np;
    memcpy(s.total, from, w.np * 8);
}

static int64_t checkpoint_floats(const Args *a) {
    if (!a->causal) return 0;
    Row w;
    w.sizes(a);
    return a->rows * ((a->t + SEGMENT - 1) / SEGMENT) * carry_floats(w);
}

static size_t scratch_floats(const Args *a) {
    Row w;
    w.sizes(a);
    size_t np = w.np, dp = w.dp, ep = w.ep, piece = w.piece, rows = a->backward ? SEGMENT : piece;
    if (is_step(a)) return 5 * np + ep;  // step_row
    size_t tokens = piece * (12 * np + 6 * dp + 6 * ep + 6 * piece) + 6 * rows * np, state = dp * np + np * ep + 8 * np;
    size_t reads = a->g * piece * (np + ep + 1) + PAGE + 64;
    return tokens + reads + 8 * state + (a->backward && a->causal ? (SEGMENT + 1) * (state + 64) : 0) + 4096;
}

// Linear read: z = f(q) x of the slots that may be seen, and the denominators f(q) . mass.
static void features(const Row &w, const float *mass, int length, const float *f, float *z, float *den) {
    for (int i = 0; i < length; i++) {
        vec total = {};
        for (int j = 0; j < w.np; j += VL) {
            int l = i * w.np + j;
            vec seen = w.masked() ? (load(w.allow + l) == (vec){} ? load(f + l) : (vec){}) : load(f + l);
            vec share = seen * load(w.x + l);
            total += share * (load(mass + j) + load(w.cumulative + l));
            store(z + l, share);
        }
        den[i] = w.a->floor ? fmaxf(sum(total), w.a->floor) : sum(total);
    }
}

// Brings the tokens of the next piece nearer while this one is multiplied. The processor follows a stream of addresses
// only to the end of a page, and a piece is about a page of each tensor.
struct Ahead {
    const char *at[4], *end[4];
    int stream = 0, streams;

    Ahead(const Row &w, int64_t from, int64_t stop) : streams(w.a->causal ? 4 : 3) {
        const float *const starts[] = {w.phi, w.k, w.v, w.q};
        const int widths[] = {w.n, w.d, w.e, w.a->linear ? w.n : w.d};
        for (int i = 0; i < 4; i++)
            at[i] = (const char *)(starts[i] + from * widths[i]), end[i] = (const char *)(starts[i] + stop * widths[i]);
    }

    void operator()() {
        while (stream < streams && at[stream] >= end[stream]) stream++;
        if (stream == streams) return;
#pragma GCC unroll 16
        for (int line = 0; line < 16; line++) __builtin_prefetch(at[stream] + line * 64, 0, 2);
        at[stream] += 16 * 64;
    }
};

static void forward_row(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.begin(a, row, scratch);
    Carry s;
    w.take_carry(s);
    const int n = w.n, d = w.d, e = w.e, np = w.np, dp = w.dp, ep = w.ep, piece = w.piece, g = (int)a->g;
    const int64_t t = a->t, segments = (t + SEGMENT - 1) / SEGMENT;
    float *f = w.take(piece * np), *ob = w.take(g * piece * ep), *den = w.take(g * piece), *z = w.take(g * piece * np + PAGE);
    // A load waits for stores before it whose addresses agree with its own but for the page. Rows of z and of q (and k, which
    // lies as q does) pass side by side: where all start at the same place in a page, none is read just after such a store.
    z += ((uintptr_t)w.q - (uintptr_t)z) / sizeof(float) % PAGE & ~(uintptr_t)15;
    w.used = a->used + row * n;
    memcpy(w.used, a->old_used + row * n, n);
    w.enter(s, a->old_k + row * n * d, a->old_v + row * n * e, a->old_mass + row * n,
            a->mean ? a->old_total + row * n : nullptr);
    for (int64_t from = 0; from < t;) {
        if (a->checkpoints && from % SEGMENT == 0)
            keep(w, s, a->checkpoints + (row * segments + from / SEGMENT) * carry_floats(w));
        for (int64_t end = from + piece < t ? from + piece : t, length; from < end; from += length) {
            length = w.length_of_piece(s, from, end - from);
            w.coefficients(s, from, length);
            w.tokens(from, length);
            const int64_t after = from + length, at = row * g * t + from;  // of the first group, the others t further
            Ahead ahead(w, after, after + piece < t ? after + piece : t);
            if (a->linear) {
                for (int group = 0; group < g; group++)
                    features(w, s.mass, length, padded(length, n, w.q + (group * t + from) * n, f, np, 0.0f),
                             z + group * piece * np, den + group * piece);
                w.advance_turned(s, length, ahead);
            } else {
                Recurrence keys{(int)length, g, w.keys, dp, w.c, np, w.q + from * d, d, t * d, z, np, piece * np};
                if (d) keys.run(d, np, s.turned, np, ahead);
                else memset(z, 0, (size_t)g * piece * np * sizeof(float));
                for (int group = 0; group < g; group++)
                    w.weigh(length, z + group * piece * np, w.x, w.masked() ? w.allow : nullptr,
                            a->scores ? a->scores + (at + group * t) * n : nullptr, a->lse ? a->lse + at + group * t : nullptr);
            }
            const bool direct = e == ep;
            float *to = direct ? a->out + at * e : ob;
            const int64_t next = direct ? t * e : piece * ep;
            Recurrence values{(int)length, g, w.c, np, w.values, ep, z, np, piece * np, to, ep, next};
            values.run(n, ep, s.plain, ep, ahead);
            w.advance_mass(s, length);
            for (int group = 0; group < g; group++, to += next) {
                for (int i = 0; a->linear && i < length; i++)  // last: what is divided is as small as what divides it
                    for (int j = 0; j < ep; j += VL) store(to + i * ep + j, over(load(to + i * ep + j), den[group * piece + i]));
                for (int i = 0; !direct && i < length; i++) memcpy(a->out + (at + group * t + i) * e, to + i * ep, e * 4);
            }
        }
    }
    w.leave(s, row);
    for (int i = 0; !w.masked() && i < n; i++) w.used[i] = w.used_after(i);  // otherwise followed token by token
}

// Not causal: every token is written, then every query reads what all of them left.
static void forward_whole(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.begin(a, row, scratch);
    Carry s;
    w.take_carry(s);
    const int n = w.n, d = w.d, e = w.e, np = w.np, ep = w.ep, piece = w.piece;
    float *z = w.take(piece * np), *ob = w.take(piece * ep), *allow = w.take(piece * np);
    w.used = a->used + row * n;
    memcpy(w.used, a->old_used + row * n, n);
    w.enter(s, a->old_k + row * n * d, a->old_v + row * n * e, a->old_mass + row * n, a->old_total + row * n);
    for (int64_t from = 0; from < a->t;) {
        for (int64_t end = from + piece < a->t ? from + piece : a->t, length; from < end; from += length) {
            length = w.length_of_piece(s, from, end - from);
            w.coefficients(s, from, length);
            w.tokens(from, length);
            const int64_t after = from + length;
            Ahead ahead(w, after, after + piece < a->t ? after + piece : a->t);
            w.advance_turned(s, length, ahead), w.advance_plain(s, length, ahead);
        }
    }
    w.leave(s, row);
    for (int i = 0; i < n; i++) w.used[i] = w.used_after(i);
    memcpy(w.shrink, s.scale, np * 4);
    w.rescale(s);
    for (int j = 0; j < np; j++)
        for (int i = 0; i < piece; i++) allow[i * np + j] = j < n && (!a->mask_empty || w.used[j]) ? 0.0f : -INFINITY;
    for (int64_t group = 0; group < a->g; group++)
        for (int64_t from = 0; from < a->queries; from += piece) {
            const int length = (int)(a->queries - from < piece ? a->queries - from : piece);
            const int64_t at = (row * a->g + group) * a->queries + from;
            product(length, np, d, w.q + (group * a->queries + from) * d, d, 1, s.turned, np, z, np);
            w.weigh(length, z, nullptr, w.masked() ? allow : nullptr, a->scores ? a->scores + at * n : nullptr,
                    a->lse ? a->lse + at : nullptr);
            float *to = e == ep ? a->out + at * e : ob;
            product(length, ep, n, z, np, 1, s.plain, ep, to, ep);
            for (int i = 0; to == ob && i < length; i++) memcpy(a->out + (at + i) * e, ob + i * ep, e * 4);
        }
}
