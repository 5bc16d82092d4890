// One pass of the bounded memory over a row of tokens, forward and backward, written once with vectors of VL floats.
// native.cpp includes this file once per instruction set.
//
// Tokens are taken in pieces. In a piece that starts from the memory (K, V, mass) query t reads, for slot n,
//
//     K_tn = r_tn K_n + x_tn sum_{j <= t} c_jn k_j          (V and mass alike)
//
// which covers both ways of writing:
//     running mean of log-weights s (A the running sum):  c_j = exp(s_j),  x_t = 1 / A_t,  r_t = A_0 / A_t
//     phi and log_decay (L their sum after the first):    c_j = phi_j exp(-L_j),  x_t = exp(L_t),  r_t = exp(ld_1) x_t
// so a piece is a handful of small products of matrices. A piece is PIECE tokens where the range of exponents inside it
// is small, and a single token where it is not: exact either way.

typedef float vec __attribute__((vector_size(4 * VL), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * VL), aligned(4)));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec x) { *(vec *)p = x; }
static inline vec splat(float x) { return x - (vec){}; }
static inline vec vmax(vec a, vec b) { return a > b ? a : b; }

// x with its lanes turned by S: the step of a reduction over lanes.
template <int S>
static inline vec turned(vec x) {
    ivec order;
    for (int l = 0; l < VL; l++) order[l] = (l + S) % VL;
    return __builtin_shuffle(x, order);
}

static inline float sum(vec x) {
    if (VL > 8) x += turned<8 % VL>(x);
    if (VL > 4) x += turned<4 % VL>(x);
    x += turned<2>(x);
    x += turned<1>(x);
    return x[0];
}

static inline vec over(vec x, float den) { return den == 0 ? (vec){} : x / den; }

static inline float highest(vec x) {
    if (VL > 8) x = vmax(x, turned<8 % VL>(x));
    if (VL > 4) x = vmax(x, turned<4 % VL>(x));
    x = vmax(x, turned<2>(x));
    x = vmax(x, turned<1>(x));
    return x[0];
}

// exp to about one ulp, 0 below -87 (-inf too), exactly 1 at 0.
static inline vec vexp(vec x) {
    const vec low = splat(-87.0f), magic = splat(12582912.0f);
    ivec under = x < low;
    x = vmax(x, low);
    x = x > splat(88.0f) ? splat(88.0f) : x;
    vec k = (x * 1.44269504088896341f + magic) - magic;
    vec f = (x - k * 0.693359375f) - k * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    ivec bits = (ivec)p + (__builtin_convertvector(k, ivec) << 23);
    return under ? (vec){} : (vec)bits;
}

// C (M x N) = A B, or added to C, or to C with its columns or rows decayed first: C = kept C + (change C + A B), rounded
// at the size of C once, where kept is 0 or 1. A_ik stands at a[i * row + k * step];
// B and C are rows of whole vectors. `triangle` stops k at the row's own index: A is lower triangular.
enum Mode { SET, ADD, DECAY_COLUMNS, DECAY_ROWS };

template <int N>
struct Number {
    static constexpr int value = N;
};

template <int M, int N, Mode mode>
static inline void tile(ptrdiff_t K, const float *a, ptrdiff_t row, ptrdiff_t step, const float *b, ptrdiff_t ldb, float *c,
                        ptrdiff_t ldc, const float *change, const float *kept) {
    vec acc[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) {
            acc[i][j] = mode == SET ? (vec){} : load(c + i * ldc + j * VL);
            if (mode == DECAY_COLUMNS) acc[i][j] *= load(change + j * VL);
            if (mode == DECAY_ROWS) acc[i][j] *= splat(change[i]);
        }
    for (ptrdiff_t k = 0; k < K; k++, a += step, b += ldb) {
        vec right[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) right[j] = load(b + j * VL);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            vec left = splat(a[i * row]);
#pragma GCC unroll 4
            for (int j = 0; j < N; j++) acc[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) {
            float *to = c + i * ldc + j * VL;
            if (mode == DECAY_COLUMNS) acc[i][j] += load(to) * load(kept + j * VL);
            if (mode == DECAY_ROWS) acc[i][j] += load(to) * splat(kept[i]);
            store(to, acc[i][j]);
        }
}

template <Mode mode = SET, bool triangle = false>
static inline void product(int M, int N, int K, const float *a, ptrdiff_t row, ptrdiff_t step, const float *b, ptrdiff_t ldb,
                           float *c, ptrdiff_t ldc, const float *change = nullptr, const float *kept = nullptr) {
    int j = 0;
    auto strips = [&](auto columns) __attribute__((always_inline)) {
        constexpr int C = decltype(columns)::value;
        for (; j + C * VL <= N; j += C * VL) {
            int i = 0;
            auto tiles = [&](auto rows) __attribute__((always_inline)) {
                constexpr int R = decltype(rows)::value;
                for (; i + R <= M; i += R) {
                    int at = mode == DECAY_COLUMNS ? j : mode == DECAY_ROWS ? i : 0;
                    tile<R, C, mode>(triangle ? i + R : K, a + i * row, row, step, b + j, ldb, c + i * ldc + j, ldc,
                                     change ? change + at : nullptr, kept ? kept + at : nullptr);
                }
            };
            tiles(Number<ROWS>()), tiles(Number<2>()), tiles(Number<1>());
        }
    };
    strips(Number<COLUMNS>()), strips(Number<2>()), strips(Number<1>());
}

// Square tiles by butterflies: exchange the off-diagonal blocks of size 1, 2, 4, ...
template <int S>
static inline void exchange(vec *v) {
    ivec low, high;
    for (int l = 0; l < VL; l++) {
        low[l] = l & S ? VL + l - S : l;
        high[l] = l & S ? VL + l : l + S;
    }
    for (int i = 0; i < VL; i++)
        if (!(i & S)) {
            vec a = v[i], b = v[i + S];
            v[i] = __builtin_shuffle(a, b, low);
            v[i + S] = __builtin_shuffle(a, b, high);
        }
}

static void transpose(int rows, int columns, const float *from, int ldf, float *to, int ldt) {
    for (int i = 0; i < rows; i += VL)
        for (int j = 0; j < columns; j += VL) {
            vec v[VL];
            for (int l = 0; l < VL; l++) v[l] = load(from + (i + l) * ldf + j);
            if (VL > 1) exchange<1>(v);
            if (VL > 2) exchange<2>(v);
            if (VL > 4) exchange<4 % VL>(v);
            if (VL > 8) exchange<8 % VL>(v);
            for (int l = 0; l < VL; l++) store(to + (j + l) * ldt + i, v[l]);
        }
}

static void copy_rows(int rows, int width, const float *from, float *to, int ldt) {
    for (int i = 0; i < rows; i++) {
        memcpy(to + i * ldt, from + (size_t)i * width, width * sizeof(float));
        for (int j = width; j < ldt; j++) to[i * ldt + j] = 0;
    }
}

// Rows of whole vectors stay where they are; others are copied and filled up.
static const float *padded(int rows, int width, const float *from, float *to, int ldt, float fill) {
    if (width == ldt) return from;
    for (int i = 0; i < rows; i++) {
        memcpy(to + i * ldt, from + (size_t)i * width, width * sizeof(float));
        for (int j = width; j < ldt; j++) to[i * ldt + j] = fill;
    }
    return to;
}

// The memory and the running sum while a row of tokens passes.
struct Carry {
    float *kt, *v, *mass;  // dp x np (transposed), np x ep, np
    float *top;            // np   running mean: total * exp(top) is the running sum
    double *total;
};

// One row's view of the arguments, and room for one piece.
struct Row {
    const Args *a;
    int n, d, e, np, dp, ep;
    const float *q, *k, *v, *phi, *ld;
    const uint8_t *readable;
    uint8_t *used;
    float *room;  // scratch, handed out by `take`
    size_t taken;
    const float *keys, *values;  // of the piece
    float *change, *kept;  // r of the last token as kept + change: a small change is exact, not 1 - a rounded r
    float *peak, *kb, *kT, *vb, *r, *x, *c, *cT, *xc, *inverse, *allow, *cumulative;

    float *take(size_t count) {
        float *p = room + taken;
        taken += (count + 15) & ~(size_t)15;
        return p;
    }

    void sizes(const Args *args) {
        a = args;
        n = a->n, d = a->d, e = a->e;
        np = (n + VL - 1) / VL * VL, dp = (d + VL - 1) / VL * VL, ep = (e + VL - 1) / VL * VL;
    }

    void begin(const Args *args, int64_t row, float *scratch) {
        sizes(args);
        int64_t t = a->t;
        q = a->q + row * a->g * t * (a->linear ? n : d);
        k = a->k + row * t * d, v = a->v + row * t * e, phi = a->phi + row * t * n;
        ld = a->log_decay ? a->log_decay + row * t * n : nullptr;
        readable = a->readable ? a->readable + row * t * n : nullptr;
        used = nullptr;
        room = scratch, taken = 0;
        change = take(np), kept = take(np), peak = take(np), kb = take(PIECE * dp), kT = take(dp * PIECE), vb = take(PIECE * ep);
        r = take(PIECE * np), x = take(PIECE * np), c = take(PIECE * np), cT = take(np * PIECE), xc = take(PIECE * np);
        inverse = take(PIECE * np), allow = take(PIECE * np), cumulative = take(PIECE * np);
    }

    void take_carry(Carry &s) {
        s.kt = take(dp * np), s.v = take(np * ep), s.mass = take(np), s.top = take(np), s.total = (double *)take(2 * np);
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

    // The log-weights of a piece, and the highest of each slot so far and in it.
    const float *peaks(const Carry &s, int64_t from, int length) {
        const float *logs = padded(length, n, phi + from * n, c, np, -INFINITY);
        for (int j = 0; j < np; j += VL) store(peak + j, load(s.top + j));
        for (int i = 0; i < length; i++)
            for (int j = 0; j < np; j += VL) store(peak + j, vmax(load(peak + j), load(logs + i * np + j)));
        return logs;
    }

    // Whether `length` tokens from `from` on can be one piece.
    bool mild(const Carry &s, int64_t from, int length) {
        if (length == 1) return true;
        if (a->mean) {
            const float *logs = peaks(s, from, length);
            ivec wide = {};
            for (int j = 0; j < np; j += VL) {
                vec top = load(peak + j), first = vmax(load(s.top + j), load(logs + j));
                // not <=: a NaN, where the first is -inf and others are not, counts as wide
                wide |= ~(top - first <= splat(60.0f)) & (top != splat(-INFINITY));
            }
            int any = 0;
            for (int l = 0; l < VL; l++) any |= wide[l];
            return !any;
        }
        if (!ld) return true;
        for (int j = 0; j < n; j++) x[j] = 0;
        for (int i = 1; i < length; i++)
            for (int j = 0; j < n; j++) x[j] += ld[(from + i) * n + j];
        for (int j = 0; j < n; j++)
            if (!(x[j] >= -16.0f)) return false;
        return true;
    }

    // r, x, c (and what the read may see) of a piece; the running sum moves on.
    void coefficients(Carry &s, int64_t from, int length) {
        const vec zero = {}, one = splat(1.0f);
        if (a->mean) {
            const float *logs = peaks(s, from, length);
            for (int j = 0; j < np; j += VL) {
                vec old = load(s.top + j), top = load(peak + j);
                vec against = top == splat(-INFINITY) ? zero : top;
                vec shrink = vexp(old - against), before, sum = zero;
                for (int l = 0; l < VL; l++) {
                    s.total[j + l] *= shrink[l];
                    before[l] = (float)s.total[j + l];
                }
                for (int i = 0; i < length; i++) {
                    vec w = vexp(load(logs + i * np + j) - against);
                    sum += w;
                    vec all = before + sum, share = all > zero ? one / all : zero;
                    store(c + i * np + j, w);
                    store(x + i * np + j, share);
                    store(r + i * np + j, before * share);
                }
                for (int l = 0; l < VL; l++) s.total[j + l] += sum[l];
                store(s.top + j, top);
            }
        } else {
            const float *shares = padded(length, n, phi + from * n, c, np, 0.0f);
            if (ld) {
                const float *logs = padded(length, n, ld + from * n, r, np, 0.0f);
                for (int j = 0; j < np; j += VL) {
                    vec first = vexp(load(logs + j)), sum = zero;
                    for (int i = 0; i < length; i++) {
                        if (i) sum += load(logs + i * np + j);
                        vec row = vexp(sum), back = i ? vexp(-sum) : one;
                        store(x + i * np + j, row);
                        store(r + i * np + j, first * row);
                        store(inverse + i * np + j, back);
                        store(c + i * np + j, load(shares + i * np + j) * back);
                    }
                }
            } else
                for (int i = 0; i < length * np; i += VL)
                    store(c + i, load(shares + i)), store(r + i, one), store(x + i, one), store(inverse + i, one);
        }
        const float *last = x + (length - 1) * np;
        for (int j = 0; j < np; j += VL) {
            vec sum = zero, left = load(r + (length - 1) * np + j);
            for (int i = 0; i < length; i++) {
                vec share = load(c + i * np + j) * load(last + j);
                sum += share;
                store(xc + i * np + j, share);
            }
            ivec mild = left > splat(0.5f);
            store(kept + j, mild ? one : zero);
            store(change + j, mild ? (a->mean ? -sum : left - one) : left);
        }
        if (masked())
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
        if (a->linear)
            for (int j = 0; j < np; j += VL) {
                vec sum = zero;
                for (int i = 0; i < length; i++) sum += load(c + i * np + j), store(cumulative + i * np + j, sum);
            }
    }

    void tokens(int64_t from, int length) {
        keys = padded(length, d, k + from * d, kb, dp, 0.0f);
        values = padded(length, e, v + from * e, vb, ep, 0.0f);
    }

    // `... PIECE x width` transposed; rows that a short piece lacks may hold anything, but not lie outside the tensor.
    static void turn(const float *from, float *room, int length, int width, float *to) {
        if (length < PIECE && from != room) memcpy(room, from, (size_t)length * width * 4), from = room;
        transpose(PIECE, width, from, width, to, PIECE);
    }

    // The memory after the piece.
    void advance(Carry &s, int length) {
        product<DECAY_COLUMNS>(d, np, length, keys, 1, dp, xc, np, s.kt, np, change, kept);
        product<DECAY_ROWS>(n, ep, length, xc, 1, np, values, ep, s.v, ep, change, kept);
        for (int j = 0; j < np; j += VL) {
            vec sum = load(s.mass + j) * load(change + j);
            for (int i = 0; i < length; i++) sum += load(xc + i * np + j);
            store(s.mass + j, load(s.mass + j) * load(kept + j) + sum);
        }
    }

    void enter(Carry &s, const float *mk, const float *mv, const float *mass, const double *log_total) {
        memset(s.kt, 0, dp * np * sizeof(float));
        memset(s.v, 0, np * ep * sizeof(float));
        for (int i = 0; i < np; i++) {
            bool real = i < n;
            s.mass[i] = real ? mass[i] : 0;
            for (int j = 0; real && j < d; j++) s.kt[j * np + i] = mk[i * d + j];
            for (int j = 0; real && j < e; j++) s.v[i * ep + j] = mv[i * e + j];
            double logarithm = real && log_total ? log_total[i] : -INFINITY;
            s.top[i] = (float)logarithm;
            s.total[i] = logarithm == -INFINITY ? 0.0 : exp(logarithm - (double)s.top[i]);
        }
    }
};

static inline void lower(float *p, int length) {  // zero above the diagonal
    for (int i = 0; i < length; i++)
        for (int j = i + 1; j < PIECE; j++) p[i * PIECE + j] = 0;
}

// A checkpoint holds the carry as it is, so that the backward pass retraces the same steps.
static size_t carry_floats(const Row &w) { return (size_t)w.dp * w.np + (size_t)w.np * w.ep + 4 * w.np; }

static void keep(const Row &w, const Carry &s, float *to) {
    memcpy(to, s.kt, w.dp * w.np * 4), to += w.dp * w.np;
    memcpy(to, s.v, w.np * w.ep * 4), to += w.np * w.ep;
    memcpy(to, s.mass, w.np * 4), to += w.np;
    memcpy(to, s.top, w.np * 4), to += w.np;
    memcpy(to, s.total, w.np * 8);
}

static void recall(const Row &w, Carry &s, const float *from) {
    memcpy(s.kt, from, w.dp * w.np * 4), from += w.dp * w.np;
    memcpy(s.v, from, w.np * w.ep * 4), from += w.np * w.ep;
    memcpy(s.mass, from, w.np * 4), from += w.np;
    memcpy(s.top, from, w.np * 4), from += w.np;
    memcpy(s.total, from, w.np * 8);
}

static int64_t checkpoint_floats(const Args *a) {
    Row w;
    w.sizes(a);
    return a->rows * ((a->t + SEGMENT - 1) / SEGMENT) * carry_floats(w);
}

static size_t scratch_floats(const Args *a) {
    Row w;
    w.sizes(a);
    size_t np = w.np, dp = w.dp, ep = w.ep;
    if (a->t == 1 && !a->backward && !a->checkpoints) return 5 * np + ep;  // step_row
    size_t piece = PIECE * (20 * np + 6 * dp + 6 * ep + 6 * PIECE), state = dp * np + np * ep + 8 * np;
    return piece + 8 * state + (a->backward ? (SEGMENT + 1) * (state + 64) : 0) + 4096;
}

// Linear read: f(q) as it may be seen, and the denominator f(q) . mass of each query.
static void denominators(const Row &w, const Carry &s, int length, float *f, float *den) {
    for (int i = 0; i < length; i++) {
        vec total = {};
        for (int j = 0; j < w.np; j += VL) {
            int l = i * w.np + j;
            vec seen = w.masked() ? (load(w.allow + l) == (vec){} ? load(f + l) : (vec){}) : load(f + l);
            store(f + l, seen);
            total += seen * (load(w.r + l) * load(s.mass + j) + load(w.x + l) * load(w.cumulative + l));
        }
        den[i] = sum(total);
    }
}

static void forward_row(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.begin(a, row, scratch);
    Carry s;
    w.take_carry(s);
    const int n = w.n, d = w.d, e = w.e, np = w.np, dp = w.dp, ep = w.ep;
    const int64_t t = a->t;
    float *p = w.take(PIECE * np), *g = w.take(PIECE * np), *z = w.take(PIECE * np);
    float *pairs = w.take(PIECE * PIECE), *ob = w.take(PIECE * ep), *den = w.take(PIECE);
    w.used = a->used + row * n;
    memcpy(w.used, a->old_used + row * n, n);
    w.enter(s, a->old_k + row * n * d, a->old_v + row * n * e, a->old_mass + row * n,
            a->mean ? a->old_total + row * n : nullptr);
    const int64_t segments = (t + SEGMENT - 1) / SEGMENT;
    const bool masked = w.masked();
    for (int64_t from = 0; from < t;) {
        if (a->checkpoints && from % SEGMENT == 0)
            keep(w, s, a->checkpoints + (row * segments + from / SEGMENT) * carry_floats(w));
        int whole = (int)(t - from < PIECE ? t - from : PIECE);
        int length = w.mild(s, from, whole) ? whole : 1;
        for (int64_t end = from + whole; from < end; from += length) {
            w.coefficients(s, from, length);
            w.tokens(from, length);
            if (length > 1) {
                if (!a->linear) w.turn(w.keys, w.kb, length, dp, w.kT);
                transpose(PIECE, np, w.c, np, w.cT, PIECE);
            }
            for (int64_t group = 0; group < a->g; group++) {
                int64_t at = (row * a->g + group) * t + from;
                const float *q = w.q + (group * t + from) * (a->linear ? n : d);
                if (a->linear) copy_rows(length, n, q, p, np);
                else {
                    product(length, np, d, q, d, 1, s.kt, np, g, np);
                    if (length > 1) {
                        product(length, PIECE, d, q, d, 1, w.kT, PIECE, pairs, PIECE);
                        lower(pairs, length);
                        product<SET, true>(length, np, length, pairs, PIECE, 1, w.c, np, z, np);
                    } else {
                        float dot = 0;
                        for (int j = 0; j < d; j++) dot += q[j] * w.keys[j];
                        for (int j = 0; j < np; j += VL) store(z + j, load(w.c + j) * dot);
                    }
                }
                if (a->linear) {
                    denominators(w, s, length, p, den);
                    for (int l = 0; l < length * np; l += VL) {
                        vec weight = load(p + l);
                        store(g + l, weight * load(w.r + l));
                        store(z + l, weight * load(w.x + l));
                    }
                } else {
                    for (int i = 0; i < length; i++) {
                        vec top = splat(-INFINITY);
                        for (int j = 0; j < np; j += VL) {
                            int l = i * np + j;
                            vec score = (load(w.r + l) * load(g + l) + load(w.x + l) * load(z + l)) * a->scale;
                            if (masked) score += load(w.allow + l);
                            top = vmax(top, score);
                            store(p + l, score);
                        }
                        if (a->scores) memcpy(a->scores + (at + i) * n, p + i * np, n * 4);
                        den[i] = highest(top);
                    }
                    for (int i = 0; i < length; i++) {
                        vec total = {};
                        float best = den[i] == -INFINITY ? 0 : den[i];
                        for (int j = 0; j < np; j += VL) {
                            int l = i * np + j;
                            vec weight = vexp(load(p + l) - best);
                            total += weight;
                            store(g + l, weight * load(w.r + l));
                            store(z + l, weight * load(w.x + l));
                        }
                        den[i] = sum(total);
                    }
                }
                float *to = e == ep ? a->out + at * e : ob;
                product(length, ep, n, g, np, 1, s.v, ep, to, ep);
                if (length > 1) {
                    product(length, PIECE, n, z, np, 1, w.cT, PIECE, pairs, PIECE);
                    lower(pairs, length);
                    product<ADD, true>(length, ep, length, pairs, PIECE, 1, w.values, ep, to, ep);
                } else {
                    vec dot = {};
                    for (int j = 0; j < np; j += VL) dot += load(z + j) * load(w.c + j);
                    float own = sum(dot);
                    for (int j = 0; j < ep; j += VL) store(to + j, load(to + j) + load(w.values + j) * own);
                }
                for (int i = 0; i < length; i++) {
                    for (int j = 0; j < ep; j += VL) store(to + i * ep + j, over(load(to + i * ep + j), den[i]));
                    if (to == ob) memcpy(a->out + (at + i) * e, ob + i * ep, e * 4);
                }
            }
            w.advance(s, length);
        }
    }
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < d; j++) a->memory_k[(row * n + i) * d + j] = s.kt[j * np + i];
        memcpy(a->memory_v + (row * n + i) * e, s.v + i * ep, e * 4);
        a->mass[row * n + i] = s.mass[i];
        if (a->mean) a->log_total[row * n + i] = s.total[i] == 0 ? -INFINITY : (double)s.top[i] + log(s.total[i]);
        if (!w.masked()) w.used[i] = w.used_after(i);  // otherwise followed token by token
    }
}

// One token and no gradient, as in decoding: the memory is written and read as it lies.
static void step_row(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.sizes(a);
    const int n = w.n, d = w.d, e = w.e, np = w.np;
    float *r = scratch, *share = r + np, *kept = share + np, *change = kept + np, *p = change + np, *ob = p + np;
    const float *phi = a->phi + row * n, *ld = a->log_decay ? a->log_decay + row * n : nullptr;
    const uint8_t *was_used = a->old_used + row * n, *readable = a->readable ? a->readable + row * n : nullptr;
    uint8_t *used = a->used + row * n;
    for (int j = 0; j < np; j++) {
        r[j] = 0, share[j] = -INFINITY;
        if (j >= n) continue;
        if (a->mean) {
            // log(A + w) = the higher logarithm + log1p(...): fp32 is enough for the second, which is small
            double before = a->old_total[row * n + j], high = before > phi[j] ? before : phi[j], after = high;
            if (high != -INFINITY) {
                after += log1pf(expf((float)-fabs(before - phi[j])));
                r[j] = (float)(before - after), share[j] = (float)(phi[j] - after);
            }
            a->log_total[row * n + j] = after;
            used[j] = was_used[j] || phi[j] > -INFINITY;
        } else {
            r[j] = ld ? ld[j] : 0, share[j] = phi[j];
            used[j] = (was_used[j] && r[j] != -INFINITY) || phi[j] != 0;
        }
    }
    for (int j = 0; j < np; j += VL) {
        vec left = vexp(load(r + j)), one = splat(1.0f);
        if (a->mean) store(share + j, vexp(load(share + j)));
        ivec mild = left > splat(0.5f);
        store(kept + j, mild ? one : (vec){});
        store(change + j, mild ? (a->mean ? -load(share + j) : left - one) : left);
    }
    auto write = [&](int slot, int width, const float *old, const float *token, float *to) __attribute__((always_inline)) {
        const float stays = kept[slot], changes = change[slot], enters = share[slot];
        int j = 0;
        for (; j + VL <= width; j += VL)
            store(to + j, load(old + j) * stays + (load(old + j) * changes + load(token + j) * enters));
        for (; j < width; j++) to[j] = old[j] * stays + (old[j] * changes + token[j] * enters);
    };
    for (int i = 0; i < n; i++) {
        int64_t slot = row * n + i;
        write(i, d, a->old_k + slot * d, a->k + row * d, a->memory_k + slot * d);
        write(i, e, a->old_v + slot * e, a->v + row * e, a->memory_v + slot * e);
        a->mass[slot] = a->old_mass[slot] * kept[i] + (a->old_mass[slot] * change[i] + share[i]);
    }
    for (int64_t group = 0; group < a->g; group++) {
        const int64_t at = row * a->g + group;
        const float *q = a->q + at * (a->linear ? n : d);
        float best = -INFINITY, den = 0;
        for (int i = 0; i < n; i++) {
            bool see = (!a->mask_empty || used[i]) && (!readable || readable[i]);
            if (a->linear) {
                p[i] = see ? q[i] : 0;
                den += p[i] * a->mass[row * n + i];
                continue;
            }
            const float *key = a->memory_k + (row * n + i) * d;
            vec dots = {};
            int j = 0;
            for (; j + VL <= d; j += VL) dots += load(q + j) * load(key + j);
            float dot = sum(dots);
            for (; j < d; j++) dot += q[j] * key[j];
            p[i] = see ? dot * a->scale : -INFINITY;
            best = p[i] > best ? p[i] : best;
        }
        if (!a->linear) {
            for (int i = n; i < np; i++) p[i] = -INFINITY;
            vec total = {};
            for (int i = 0; i < np; i += VL) {
                vec weight = vexp(load(p + i) - (best == -INFINITY ? 0 : best));
                total += weight;
                store(p + i, weight);
            }
            den = sum(total);
        }
        memset(ob, 0, w.ep * sizeof(float));
        for (int i = 0; i < n; i++) {
            const float *value = a->memory_v + (row * n + i) * e;
            int j = 0;
            for (; j + VL <= e; j += VL) store(ob + j, load(ob + j) + load(value + j) * p[i]);
            for (; j < e; j++) ob[j] += value[j] * p[i];
        }
        for (int j = 0; j < e; j++) a->out[at * e + j] = den == 0 ? 0 : ob[j] / den;
    }
}

// The gradients, piece by piece from the last to the first. With S the scores, p the read weights, and for every query
//     dp_tn = d_out_t . V_tn,   dS = p (dp - sum p dp),   u = dS S + p dp   (what scaling slot n's memory at t would do)
// the gradient of a token's share is that of its row in K and V; that of the running sum is -u, that of the decays the
// sum of u - phi d_phi over later tokens. The memories at the pieces' starts are recomputed from the checkpoints.
static void backward_row(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.begin(a, row, scratch);
    Carry s;
    w.take_carry(s);
    const int n = w.n, d = w.d, e = w.e, np = w.np, dp = w.dp, ep = w.ep;
    const int64_t t = a->t, segments = (t + SEGMENT - 1) / SEGMENT;
    const size_t state = carry_floats(w);
    float *qb = w.take(PIECE * dp), *gb = w.take(PIECE * ep), *vT = w.take(ep * PIECE);
    float *p = w.take(PIECE * np), *dS = w.take(PIECE * np), *from_k = w.take(PIECE * np), *from_piece = w.take(PIECE * np);
    float *y = w.take(PIECE * np), *z = w.take(PIECE * np), *u = w.take(PIECE * np), *dc = w.take(PIECE * np);
    float *pairs = w.take(PIECE * PIECE), *outer = w.take(PIECE * PIECE), *mix = w.take(PIECE * PIECE);
    float *dqb = w.take(PIECE * dp), *dkb = w.take(PIECE * dp), *dvb = w.take(PIECE * ep);
    float *K = w.take(np * dp), *vt = w.take(ep * np), *dkt = w.take(dp * np), *dvt = w.take(ep * np);
    float *dK = w.take(np * dp), *dV = w.take(np * ep), *dmass = w.take(np), *den = w.take(PIECE);
    double *carried = (double *)w.take(2 * np);  // running mean: u over later tokens, by A_0 / A_t; decays: u - phi d_phi
    float *starts = w.take(SEGMENT * state);
    memset(qb, 0, (size_t)((float *)starts - qb) * sizeof(float));
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < d; j++) dK[i * dp + j] = a->d_memory_k[(row * n + i) * d + j];
        for (int j = 0; j < e; j++) dV[i * ep + j] = a->d_memory_v[(row * n + i) * e + j];
        dmass[i] = a->d_mass[row * n + i];
        carried[i] = 0;
    }
    for (int64_t segment = segments - 1; segment >= 0; segment--) {
        // Once more forward through the segment, noting where each piece starts and from what.
        int64_t first = segment * SEGMENT, stop = first + SEGMENT < t ? first + SEGMENT : t;
        int64_t begins[SEGMENT];
        int lengths[SEGMENT], pieces = 0;
        recall(w, s, a->checkpoints + (row * segments + segment) * state);
        for (int64_t from = first; from < stop;) {
            int whole = (int)(stop - from < PIECE ? stop - from : PIECE);
            int length = w.mild(s, from, whole) ? whole : 1;
            for (int64_t end = from + whole; from < end; from += length) {
                begins[pieces] = from, lengths[pieces] = length;
                keep(w, s, starts + pieces++ * state);
                w.coefficients(s, from, length);
                w.tokens(from, length);
                w.advance(s, length);
            }
        }
        if (segment == segments - 1)  // what the scale of the last memory does
            for (int i = 0; i < n; i++) {
                double dot = (double)dmass[i] * s.mass[i];
                for (int j = 0; j < d; j++) dot += (double)dK[i * dp + j] * s.kt[j * np + i];
                for (int j = 0; j < e; j++) dot += (double)dV[i * ep + j] * s.v[i * ep + j];
                carried[i] = dot + (a->mean ? -a->d_log_total[row * n + i] : 0);
            }
        while (pieces--) {
            const int64_t from = begins[pieces];
            const int length = lengths[pieces];
            recall(w, s, starts + pieces * state);
            w.coefficients(s, from, length);
            w.tokens(from, length);
            transpose(PIECE, np, w.c, np, w.cT, PIECE);
            w.turn(w.values, w.vb, length, ep, vT);
            transpose(np, ep, s.v, ep, vt, np);
            transpose(np, ep, dV, ep, dvt, np);
            const float *last_r = w.r + (length - 1) * np, *last_x = w.x + (length - 1) * np;
            // Through the memory after the piece.
            product(length, np, e, w.values, ep, 1, dvt, np, dc, np);
            product(length, ep, n, w.xc, np, 1, dV, ep, dvb, ep);
            transpose(np, dp, dK, dp, dkt, np);
            product<ADD>(length, np, d, w.keys, dp, 1, dkt, np, dc, np);
            product(length, dp, n, w.xc, np, 1, dK, dp, dkb, dp);
            if (!a->linear) {
                w.turn(w.keys, w.kb, length, dp, w.kT);
                transpose(dp, np, s.kt, np, K, dp);
            }
            for (int i = 0; i < length; i++)
                for (int j = 0; j < np; j += VL) {
                    int l = i * np + j;
                    store(dc + l, (load(dc + l) + load(dmass + j)) * load(last_x + j));
                    store(u + l, (vec){});
                }
            for (int i = 0; i < n; i++) {  // from here on the gradients are of the memory before the piece
                for (int j = 0; j < dp; j += VL) store(dK + i * dp + j, load(dK + i * dp + j) * last_r[i]);
                for (int j = 0; j < ep; j += VL) store(dV + i * ep + j, load(dV + i * ep + j) * last_r[i]);
                dmass[i] *= last_r[i];
            }
            for (int64_t group = 0; group < a->g; group++) {
                const int64_t at = (row * a->g + group) * t + from;
                const float *qs = qb;
                copy_rows(length, e, a->d_out + at * e, gb, ep);
                if (a->linear) {
                    copy_rows(length, n, w.q + (group * t + from) * n, p, np);
                    denominators(w, s, length, p, den);
                    for (int i = 0; i < length; i++)
                        for (int j = 0; j < ep; j += VL) store(gb + i * ep + j, over(load(gb + i * ep + j), den[i]));
                } else
                    qs = padded(length, d, w.q + (group * t + from) * d, qb, dp, 0.0f);
                product(length, np, e, gb, ep, 1, vt, np, from_k, np);
                product(length, PIECE, e, gb, ep, 1, vT, PIECE, outer, PIECE);
                lower(outer, length);
                product<SET, true>(length, np, length, outer, PIECE, 1, w.c, np, from_piece, np);
                for (int i = 0; i < length; i++) {
                    float *pi = p + i * np, *dSi = dS + i * np;
                    vec dot = {};
                    if (!a->linear) {
                        memcpy(pi, a->scores + (at + i) * n, n * 4);
                        for (int j = n; j < np; j++) pi[j] = -INFINITY;
                        vec top = splat(-INFINITY), total = {};
                        for (int j = 0; j < np; j += VL) top = vmax(top, load(pi + j));
                        float best = highest(top);
                        if (best == -INFINITY) best = 0;
                        for (int j = 0; j < np; j += VL) {
                            vec weight = vexp(load(pi + j) - best);
                            total += weight;
                            store(y + i * np + j, weight);
                        }
                        float all = sum(total), norm = all == 0 ? 0.0f : 1.0f / all;
                        for (int j = 0; j < np; j += VL) {
                            int l = i * np + j;
                            vec weight = load(y + l) * norm;
                            vec back = load(w.r + l) * load(from_k + l) + load(w.x + l) * load(from_piece + l);
                            store(y + l, weight);
                            store(dSi + j, back);
                            dot += weight * back;
                        }
                        float mean = sum(dot);
                        for (int j = 0; j < np; j += VL) {
                            int l = i * np + j;
                            vec weight = load(y + l), back = load(dSi + j), slope = weight * (back - mean);
                            vec effect = weight == (vec){} ? (vec){} : slope * load(pi + j) + weight * back;
                            store(u + l, load(u + l) + effect);
                            slope *= a->scale;
                            store(dSi + j, slope * load(w.r + l));           // to q through the memory before
                            store(from_k + l, slope * load(w.x + l));       // ... through the piece
                            store(y + l, weight * load(w.r + l));
                            store(z + l, weight * load(w.x + l));
                        }
                    } else {
                        // o = f V / den: the denominator is one more column of V, the constant 1.
                        vec numerator = {};
                        for (int j = 0; j < np; j += VL) {
                            int l = i * np + j;
                            vec back = load(w.r + l) * load(from_k + l) + load(w.x + l) * load(from_piece + l);
                            numerator += load(pi + j) * back;
                            store(dSi + j, back);
                        }
                        float down = den[i] == 0 ? 0 : -sum(numerator) / den[i];
                        for (int j = 0; j < np; j += VL) {
                            int l = i * np + j;
                            vec f = load(pi + j);
                            vec ones = load(w.r + l) * load(s.mass + j) + load(w.x + l) * load(w.cumulative + l);
                            vec back = load(dSi + j) + ones * down;
                            if (w.masked()) back = load(w.allow + l) == (vec){} ? back : (vec){};
                            store(u + l, load(u + l) + f * back);
                            store(y + l, f * load(w.r + l));
                            store(z + l, f * load(w.x + l));
                            store(dSi + j, back);
                        }
                        memcpy(a->d_q + (at + i) * n, dSi, n * 4);
                        for (int j = 0; j < np; j += VL) store(dmass + j, load(dmass + j) + load(y + i * np + j) * down);
                        for (int j = 0; j <= i; j++) outer[i * PIECE + j] += down;
                    }
                }
                product<ADD>(n, ep, length, y, 1, np, gb, ep, dV, ep);
                product(length, PIECE, n, z, np, 1, w.cT, PIECE, mix, PIECE);
                lower(mix, length);
                product<ADD>(length, ep, length, mix, 1, PIECE, gb, ep, dvb, ep);
                product<ADD>(length, np, length, outer, 1, PIECE, z, np, dc, np);
                if (a->linear) continue;
                product(length, PIECE, d, qs, dp, 1, w.kT, PIECE, pairs, PIECE);
                lower(pairs, length);
                product<ADD>(length, np, length, pairs, 1, PIECE, from_k, np, dc, np);
                product(length, dp, n, dS, np, 1, K, dp, dqb, dp);
                product<ADD>(n, dp, length, dS, 1, np, qs, dp, dK, dp);
                product(length, PIECE, n, from_k, np, 1, w.cT, PIECE, mix, PIECE);
                lower(mix, length);
                product<ADD, true>(length, dp, length, mix, PIECE, 1, w.keys, dp, dqb, dp);
                product<ADD>(length, dp, length, mix, 1, PIECE, qs, dp, dkb, dp);
                for (int i = 0; i < length; i++) memcpy(a->d_q + (at + i) * d, dqb + i * dp, d * 4);
            }
            const int64_t at = row * t + from;
            for (int i = 0; i < length; i++) {
                memcpy(a->d_k + (at + i) * d, dkb + i * dp, d * 4);
                memcpy(a->d_v + (at + i) * e, dvb + i * ep, e * 4);
            }
            // To the shares. from_k, from_piece and z are free again.
            float *later = from_k, *grad = from_piece;
            if (a->mean) {
                for (int j = 0; j < np; j++) later[j] = last_x[j] * (float)carried[j];
                for (int i = length - 1; i >= 0; i--)
                    for (int j = 0; j < np; j += VL) {
                        int l = i * np + j;
                        vec effect = load(later + j) + load(w.x + l) * load(u + l);
                        store(later + j, effect);
                        store(grad + l, load(w.c + l) * (load(dc + l) - effect));
                        store(u + l, load(u + l) * load(w.r + l));
                    }
                for (int j = 0; j < np; j++) carried[j] *= last_r[j];
                for (int i = 0; i < length; i++)
                    for (int j = 0; j < np; j++) carried[j] += u[i * np + j];
            } else {
                for (int l = 0; l < length * np; l += VL) {
                    store(grad + l, load(dc + l) * load(w.inverse + l));
                    store(u + l, load(u + l) - load(w.c + l) * load(dc + l));
                }
                for (int i = length - 1; w.ld && i >= 0; i--)
                    for (int j = 0; j < n; j++) {
                        carried[j] += u[i * np + j];
                        size_t at_slot = (from + i) * n + j;
                        a->d_log_decay[row * t * n + at_slot] = w.ld[at_slot] == -INFINITY ? 0.0f : (float)carried[j];
                    }
            }
            for (int i = 0; i < length; i++) memcpy(a->d_phi + (at + i) * n, grad + i * np, n * 4);
        }
    }
    recall(w, s, a->checkpoints + row * segments * state);
    for (int i = 0; i < n; i++) {
        double dot = (double)dmass[i] * s.mass[i];
        for (int j = 0; j < d; j++) dot += (double)dK[i * dp + j] * s.kt[j * np + i];
        for (int j = 0; j < e; j++) dot += (double)dV[i * ep + j] * s.v[i * ep + j];
        if (a->mean) a->d_log_total[row * n + i] = s.total[i] == 0 ? 0.0 : dot - carried[i];
        for (int j = 0; j < d; j++) a->d_memory_k[(row * n + i) * d + j] = dK[i * dp + j];
        for (int j = 0; j < e; j++) a->d_memory_v[(row * n + i) * e + j] = dV[i * ep + j];
        a->d_mass[row * n + i] = dmass[i];
    }
}
