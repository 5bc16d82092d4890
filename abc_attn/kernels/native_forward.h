// The forward pass over the tokens of one row, causal or not; the equations are in native_row.h.

// A checkpoint is a copy of the forward pass's Carry, saved every SPAN tokens.
static size_t sums_floats(const Row &w) { return (size_t)w.dp * w.np + (size_t)w.np * w.ep + w.np; }
static size_t carry_floats(const Row &w) { return sums_floats(w) + 5 * w.np; }

static void save_checkpoint(const Row &w, const Carry &s, float *to) {
    memcpy(to, s.transposed, w.dp * w.np * 4), to += w.dp * w.np;
    memcpy(to, s.plain, w.np * w.ep * 4), to += w.np * w.ep;
    memcpy(to, s.mass, w.np * 4), to += w.np;
    memcpy(to, s.scale, w.np * 4), to += w.np;
    memcpy(to, s.top, w.np * 4), to += w.np;
    memcpy(to, s.level, w.np * 4), to += w.np;
    memcpy(to, s.total, w.np * 8);
}

// The backward pass holds values transposed instead of keys, so both are transposed on the way.
static void load_checkpoint(const Row &w, Carry &s, const float *from) {
    transpose(w.dp, w.np, from, w.np, s.plain, w.dp), from += w.dp * w.np;
    transpose(w.np, w.ep, from, w.ep, s.transposed, w.np), from += w.np * w.ep;
    memcpy(s.mass, from, w.np * 4), from += w.np;
    memcpy(s.scale, from, w.np * 4), from += w.np;
    memcpy(s.top, from, w.np * 4), from += w.np;
    memcpy(s.level, from, w.np * 4), from += w.np;
    memcpy(s.total, from, w.np * 8);
}

static int64_t checkpoint_floats(const Args *a) {
    if (!a->causal) return 0;
    Row w;
    w.sizes(a);
    return a->rows * ((a->t + SPAN - 1) / SPAN) * carry_floats(w);
}

static size_t scratch_floats(const Args *a) {
    Row w;
    w.sizes(a);
    size_t np = w.np, dp = w.dp, ep = w.ep, chunk = w.chunk, rows = a->backward ? SPAN : chunk;
    if (is_step(a)) return 5 * np + (np > ep ? np : ep);  // step_row
    size_t tokens = chunk * (12 * np + 6 * dp + 6 * ep + 6 * chunk) + 6 * rows * np, state = dp * np + np * ep + 12 * np;
    size_t reads = a->g * chunk * (np + ep + 1) + PAGE + 64;
    return tokens + reads + 8 * state + (a->backward && a->causal ? (SPAN + 1) * (state + 64) : 0) + 4096;
}

// Linear read (docs/maths.md, "One write rule, two reads"): z = f(q) x for the slots that may be read, and the denominators
// den = f(q) . mass, at least `floor`.
static void linear_weights(const Row &w, const float *mass, int length, const float *f, float *z, float *den) {
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

// Prefetches the tokens of the next chunk while this one is multiplied. The processor's own prefetcher stops at the end of a
// page, and a chunk is about a page of each tensor.
struct Prefetch {
    const char *at[4], *end[4];
    int tensor = 0, tensors;

    Prefetch(const Row &w, int64_t from, int64_t stop) : tensors(w.a->causal ? 4 : 3) {
        const float *const starts[] = {w.phi ? w.phi : w.ld, w.k, w.v, w.q};
        const int widths[] = {w.n, w.d, w.e, w.a->linear ? w.n : w.d};
        for (int i = 0; i < 4; i++)
            at[i] = (const char *)(starts[i] + from * widths[i]), end[i] = (const char *)(starts[i] + stop * widths[i]);
    }

    void operator()() {
        while (tensor < tensors && at[tensor] >= end[tensor]) tensor++;
        if (tensor == tensors) return;
#pragma GCC unroll 16
        for (int line = 0; line < 16; line++) __builtin_prefetch(at[tensor] + line * 64, 0, 2);
        at[tensor] += 16 * 64;
    }
};

// Causal: for each chunk, write and read token by token.
static void forward_row(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.begin(a, row, scratch);
    Carry s;
    w.take_carry(s);
    const int n = w.n, d = w.d, e = w.e, np = w.np, dp = w.dp, ep = w.ep, chunk = w.chunk, g = (int)a->g;
    const int64_t t = a->t, spans = (t + SPAN - 1) / SPAN;
    float *f = w.take(chunk * np), *ob = w.take(g * chunk * ep), *den = w.take(g * chunk), *z = w.take(g * chunk * np + PAGE);
    // A load waits for an earlier store whose address has the same offset inside a page (4 kB aliasing). The rows of z are
    // stored while those of q and k are loaded. Starting z at the same page offset as q keeps such pairs apart.
    z += ((uintptr_t)w.q - (uintptr_t)z) / sizeof(float) % PAGE & ~(uintptr_t)15;
    w.used = a->used + row * n;
    memcpy(w.used, a->old_used + row * n, n);
    w.load_memory(s, a->old_k + row * n * d, a->old_v + row * n * e, a->old_mass + row * n,
            a->mean ? a->old_total + row * n : nullptr);
    for (int64_t from = 0; from < t;) {
        if (a->checkpoints && from % SPAN == 0)
            save_checkpoint(w, s, a->checkpoints + (row * spans + from / SPAN) * carry_floats(w));
        for (int64_t end = from + chunk < t ? from + chunk : t, length; from < end; from += length) {
            // 1. The chunk's length, and its coefficients c and x
            length = w.chunk_length(s, from, end - from);
            w.coefficients(s, from, length);
            w.tokens(from, length);
            const int64_t after = from + length, at = row * g * t + from;  // the next group's queries: t further
            Prefetch prefetch(w, after, after + chunk < t ? after + chunk : t);
            // 2. Read weights. Linear: f(q). Softmax: write keys and score q against them in turn, then the softmax.
            if (a->linear) {
                for (int group = 0; group < g; group++)
                    linear_weights(w, s.mass, length, padded(length, n, w.q + (group * t + from) * n, f, np, 0.0f),
                             z + group * chunk * np, den + group * chunk);
                w.advance_transposed(s, length, prefetch);
            } else {
                Recurrence keys{(int)length, g, w.keys, dp, w.c, np, w.q + from * d, d, t * d, z, np, chunk * np};
                if (d) keys.run(d, np, s.transposed, np, prefetch);
                else memset(z, 0, (size_t)g * chunk * np * sizeof(float));
                for (int group = 0; group < g; group++)
                    w.softmax_scores(length, z + group * chunk * np, w.x, w.masked() ? w.allow : nullptr,
                            a->scores ? a->scores + (at + group * t) * n : nullptr, a->lse ? a->lse + at + group * t : nullptr);
            }
            // 3. Output: write values and read them with the weights in turn
            const bool direct = e == ep;  // rows are whole vectors: results go where they belong
            float *to = direct ? a->out + at * e : ob;
            const int64_t next = direct ? t * e : chunk * ep;
            Recurrence values{(int)length, g, w.c, np, w.values, ep, z, np, chunk * np, to, ep, next};
            values.run(n, ep, s.plain, ep, prefetch);
            w.advance_mass(s, length);
            for (int group = 0; group < g; group++, to += next) {
                // 4. Linear: divide by f(q) . mass. Last, when numerator and denominator have the same magnitude.
                for (int i = 0; a->linear && i < length; i++)
                    for (int j = 0; j < ep; j += VL)
                        store(to + i * ep + j, divide_or_zero(load(to + i * ep + j), den[group * chunk + i]));
                for (int i = 0; !direct && i < length; i++) memcpy(a->out + (at + group * t + i) * e, to + i * ep, e * 4);
            }
        }
    }
    w.store_memory(s, row);
    for (int i = 0; !w.masked() && i < n; i++) w.used[i] = w.used_after(i);  // masked: mask_slots followed it
}

// Not causal: write all tokens (eq. 3), then let every query read the memory (eq. 4).
static void forward_whole(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.begin(a, row, scratch);
    Carry s;
    w.take_carry(s);
    const int n = w.n, d = w.d, e = w.e, np = w.np, ep = w.ep, chunk = w.chunk;
    float *z = w.take(chunk * np), *ob = w.take(chunk * ep), *allow = w.take(chunk * np);
    w.used = a->used + row * n;
    memcpy(w.used, a->old_used + row * n, n);
    w.load_memory(s, a->old_k + row * n * d, a->old_v + row * n * e, a->old_mass + row * n, a->old_total + row * n);
    // 1. Write, chunk by chunk
    for (int64_t from = 0; from < a->t;) {
        for (int64_t end = from + chunk < a->t ? from + chunk : a->t, length; from < end; from += length) {
            length = w.chunk_length(s, from, end - from);
            w.coefficients(s, from, length);
            w.tokens(from, length);
            const int64_t after = from + length;
            Prefetch prefetch(w, after, after + chunk < a->t ? after + chunk : a->t);
            w.advance_transposed(s, length, prefetch), w.advance_plain(s, length, prefetch);
        }
    }
    w.store_memory(s, row);
    for (int i = 0; i < n; i++) w.used[i] = w.used_after(i);
    // 2. The sums become the memory: S *= scale
    memcpy(w.shrink, s.scale, np * 4);
    w.rescale(s);
    for (int j = 0; j < np; j++)
        for (int i = 0; i < chunk; i++) allow[i * np + j] = j < n && (!a->mask_empty || w.used[j]) ? 0.0f : -INFINITY;
    // 3. Read, a chunk of queries at a time: scores, softmax, output
    for (int64_t group = 0; group < a->g; group++)
        for (int64_t from = 0; from < a->queries; from += chunk) {
            const int length = (int)(a->queries - from < chunk ? a->queries - from : chunk);
            const int64_t at = (row * a->g + group) * a->queries + from;
            product(length, np, d, w.q + (group * a->queries + from) * d, d, 1, s.transposed, np, z, np);
            w.softmax_scores(length, z, nullptr, w.masked() ? allow : nullptr, a->scores ? a->scores + at * n : nullptr,
                    a->lse ? a->lse + at : nullptr);
            float *to = e == ep ? a->out + at * e : ob;
            product(length, ep, n, z, np, 1, s.plain, ep, to, ep);
            for (int i = 0; to == ob && i < length; i++) memcpy(a->out + (at + i) * e, ob + i * ep, e * 4);
        }
}
