// Vectors of VL floats (16 with AVX-512, 8 with AVX2, otherwise 4), and what is built from them: exp, log1p, matrix
// products in register tiles, transposes. native.cpp includes this file, and those that use it, once per instruction set.

typedef float vec __attribute__((vector_size(4 * VL), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * VL), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(4 * VL), aligned(4)));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec x) { *(vec *)p = x; }
static inline vec splat(float x) { return x - (vec){}; }
#if VL == 16
static inline vec vmax(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
#else
static inline vec vmax(vec a, vec b) { return a > b ? a : b; }
#endif

// The lanes of a (numbers 0 to VL - 1) and b (numbers VL to 2 VL - 1) that `order` names.
__attribute__((always_inline)) static inline vec shuffled(vec a, vec b, ivec order) {
#ifdef __clang__  // has no __builtin_shuffle, but compiles this loop to the same instruction
    vec found;
    for (int l = 0; l < VL; l++) found[l] = order[l] < VL ? a[order[l]] : b[order[l] - VL];
    return found;
#else
    return __builtin_shuffle(a, b, order);
#endif
}

// x with its lanes permuted: lane l takes lane l + S, cyclically. One step of a reduction over all lanes.
template <int S>
static inline vec permuted(vec x) {
    ivec order;
    for (int l = 0; l < VL; l++) order[l] = (l + S) % VL;
    return shuffled(x, x, order);
}

__attribute__((always_inline)) static inline float sum(vec x) {
    if (VL > 8) x += permuted<8 % VL>(x);
    if (VL > 4) x += permuted<4 % VL>(x);
    x += permuted<2>(x);
    x += permuted<1>(x);
    return x[0];
}

__attribute__((always_inline)) static inline float highest(vec x) {
    if (VL > 8) x = vmax(x, permuted<8 % VL>(x));
    if (VL > 4) x = vmax(x, permuted<4 % VL>(x));
    x = vmax(x, permuted<2>(x));
    x = vmax(x, permuted<1>(x));
    return x[0];
}

// exp with an error of about one ulp; exactly 0 below -87 and at -inf, exactly 1 at 0.
// exp(x) = 2^k exp(f) with k = round(x / log 2): a polynomial for exp(f), scaled by 2^k.
// NaN gives 0, as -inf - -inf of slots that are empty must; of scores (SCORES) it stays NaN: a key that is read is at fault.
template <bool SCORES = false>
__attribute__((always_inline)) static inline vec vexp(vec x) {
    const vec low = splat(-87.0f), magic = splat(12582912.0f);
#if VL == 16
    const __mmask16 real = _mm512_cmp_ps_mask((__m512)x, (__m512)low, SCORES ? _CMP_NLT_UQ : _CMP_GE_OQ);
#else
    const vec given = x;
    ivec under = SCORES ? x < low : ~(x >= low);
    x = vmax(x, low);
    x = x > splat(88.0f) ? splat(88.0f) : x;
#endif
    vec k = (x * 1.44269504088896341f + magic) - magic;
    vec f = (x - k * 0.693359375f) - k * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + f + 1.0f;
#if VL == 16
    return (vec)_mm512_maskz_scalef_ps(real, (__m512)p, (__m512)k);
#else
    ivec bits = (ivec)p + (__builtin_convertvector(k, ivec) << 23);
    const vec found = under ? (vec){} : (vec)bits;
    return SCORES ? (given == given ? found : given) : found;
#endif
}

// 1 - exp(x) for x <= 0, of vectors and numbers alike: where x is small the series, which does not cancel.
template <class T>
__attribute__((always_inline)) static inline T small_forgotten(T x) {
    T p = x * (1.0f / 5040) + 1.0f / 720;
    p = p * x + 1.0f / 120;
    p = p * x + 1.0f / 24;
    p = p * x + 1.0f / 6;
    p = p * x + 0.5f;
    return -(x + x * x * p);
}
__attribute__((always_inline)) static inline vec forgotten(vec x) {
    return x > splat(-0.5f) ? small_forgotten(x) : 1.0f - vexp(x);
}
static inline float forgotten(float x) { return x > -0.5f ? small_forgotten(x) : 1.0f - expf(x); }

// log(1 - exp(x)) for x <= 0; -inf where 1 - exp(x) is no normal number.
// log(y) = k log 2 + log(m) with m in [sqrt(1/2), sqrt(2)): a polynomial for log(m).
__attribute__((always_inline)) static inline vec log_forgotten(vec x) {
    const vec share = forgotten(x), y = share < splat(LEAST) ? splat(LEAST) : share;  // NaN stays NaN
    const ivec k = (ivec)((uvec)y - (uvec)splat(0.70710678f)) >> 23;
    vec f = (vec)((uvec)y - ((uvec)k << 23)) - 1.0f, square = f * f;
    vec p = splat(7.0376836292e-2f);
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    const vec exponent = __builtin_convertvector(k, vec);
    const vec rest = p * f * square + exponent * -2.12194440e-4f - 0.5f * square;
    return share < splat(LEAST) ? splat(-INFINITY) : f + rest + exponent * 0.693359375f;
}

// exp(x) / (1 - exp(x)) for x <= 0: minus the derivative of log_forgotten. 0 where that is -inf.
static inline vec odds(vec x) {
    const vec share = forgotten(x);
    return share < splat(LEAST) ? (vec){} : vexp(x) / share;
}

// Whether any lane is set.
static inline bool any(ivec x) {
    int32_t found = 0;
    for (int l = 0; l < VL; l++) found |= x[l];
    return found;
}

// log(1 + y) for y in [0, 1]: 2 atanh(y / (2 + y)), whose series is short there.
static inline vec vlog1p(vec y) {
    vec s = y / (2.0f + y), square = s * s, p = splat(1.0f / 15);
    p = p * square + 1.0f / 13;
    p = p * square + 1.0f / 11;
    p = p * square + 1.0f / 9;
    p = p * square + 1.0f / 7;
    p = p * square + 1.0f / 5;
    p = p * square + 1.0f / 3;
    return 2.0f * (s + s * (square * p));
}

// x / den, or zeros where the denominator is zero: a linear read of nothing gives zeros (docs/maths.md, last table).
static inline vec divide_or_zero(vec x, float den) { return den == 0 ? (vec){} : x / den; }

// 1 / x to about one ulp.
static inline vec reciprocal(vec x) {
#if VL == 16
    vec y = (vec)_mm512_rcp14_ps((__m512)x);  // 14 bits, then one Newton step: a quarter of the time of a division
    return y + y * (1.0f - x * y);
#else
    return 1.0f / x;
#endif
}

// Shapes of the matrix product C (M x N) = A B below. Triangles skip the multiplications by zero:
//     LOWER    A is zero right of its diagonal
//     UPPER    A is zero left of its diagonal
//     CORNER   what lies right of C's diagonal is not needed (clear_above_diagonal in native_backward.h zeroes it)
enum Shape { WHOLE, LOWER, UPPER, CORNER };

template <int N>
struct Constant {
    static constexpr int value = N;
};

// Rows of a tile so that its accumulators, one row of B and one element of A just fill the vector registers.
static constexpr int rows_of_tile(int columns) {
    return VL == 16 ? (columns == 4 ? 6 : columns == 2 ? 8 : 16) : columns == 2 ? 6 : 8;
}

// One tile of C: M rows of N vectors. `add` adds to what C holds.
template <int M, int N, bool add>
static inline void tile(ptrdiff_t K, const float *a, ptrdiff_t row, ptrdiff_t step, const float *b, ptrdiff_t ldb, float *c,
                        ptrdiff_t ldc) {
    vec acc[M][N];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) acc[i][j] = add ? load(c + i * ldc + j * VL) : (vec){};
    for (ptrdiff_t k = 0; k < K; k++, a += step, b += ldb) {
        vec right[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) right[j] = load(b + j * VL);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            vec left = splat(a[i * row]);
#pragma GCC unroll 4
            for (int j = 0; j < N; j++) acc[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) store(c + i * ldc + j * VL, acc[i][j]);
}

struct Nothing {
    void operator()() const {}
};

// C = A B, or C += A B with `add`. A_ik is a[i * row + k * step], so a transposed A needs no copy; rows of B and C are whole
// vectors, ldb and ldc floats apart. `between` is called before every tile: the forward pass prefetches there.
template <bool add = false, Shape shape = WHOLE, class Between = Nothing>
static inline void product(int M, int N, int K, const float *a, ptrdiff_t row, ptrdiff_t step, const float *b, ptrdiff_t ldb,
                           float *c, ptrdiff_t ldc, Between &&between = {}) {
    int j = 0;
    auto strips = [&](auto columns) __attribute__((always_inline)) {
        constexpr int C = decltype(columns)::value;
        for (; j + C * VL <= N; j += C * VL) {
            int i = 0;
            auto tiles = [&](auto rows) __attribute__((always_inline)) {
                constexpr int R = decltype(rows)::value;
                for (; i + R <= M && !(R == 6 && M - i == 8); i += R) {  // the last 8 rows as 4 + 4, since 6 + 2 is slower
                    if (shape == CORNER && j >= i + R) continue;
                    between();
                    int from = shape == UPPER ? i : 0, to = shape == LOWER ? i + R : K;
                    tile<R, C, add>(to - from, a + i * row + from * step, row, step, b + from * ldb + j, ldb,
                                    c + i * ldc + j, ldc);
                }
            };
            tiles(Constant<rows_of_tile(C)>()), tiles(Constant<4>()), tiles(Constant<2>()), tiles(Constant<1>());
        }
    };
    strips(Constant<COLUMNS>()), strips(Constant<2>()), strips(Constant<1>());
}

// The recurrence over the tokens t of a chunk, written and read in turn (docs/maths.md, N1 and N4):
//     S_r += row_tr column_t           write: row r of the sums S, a row of whole vectors
//     out_t = sum_r read_tr S_r        read
// Each of the `groups` query heads that share S reads it. Their inputs are `next_read` floats apart, their outputs
// `next_out`; `ld...` is the distance from one token to the next.
struct Recurrence {
    int length, groups;
    const float *row;
    ptrdiff_t ldrow;
    const float *column;
    ptrdiff_t ldcolumn;
    const float *read;
    ptrdiff_t ldread, next_read;
    float *out;
    ptrdiff_t ldout, next_out;

    // R rows x C vectors of S stay in registers while all tokens of the chunk are written and read. `first`: these are the
    // first rows, so `out` is set instead of added to. `alone`: there is one group.
    template <int R, int C, bool first, bool alone>
    __attribute__((always_inline)) void tile(int r, int j, float *state, ptrdiff_t stride) const {
        vec S[R][C];
        state += r * stride + j;
        float *at = state;
#pragma GCC unroll 16
        for (int i = 0; i < R; i++, at += stride)
#pragma GCC unroll 4
            for (int l = 0; l < C; l++) S[i][l] = load(at + l * VL);
        const ptrdiff_t row_step = ldrow, column_step = ldcolumn, read_step = ldread, out_step = ldout;
        const float *left = row + r, *right = column + j, *by = read + r;
        float *to = out + j;
        for (int t = length; t; t--, left += row_step, right += column_step, by += read_step, to += out_step) {
#pragma GCC unroll 4
            for (int l = 0; l < C; l++) {
                const vec wide = load(right + l * VL);
#pragma GCC unroll 16
                for (int i = 0; i < R; i++) S[i][l] += left[i] * wide;
            }
            auto reads = [&](const float *by, float *to) __attribute__((always_inline)) {
                vec acc[C];
#pragma GCC unroll 4
                for (int l = 0; l < C; l++) acc[l] = first ? by[0] * S[0][l] : load(to + l * VL);
#pragma GCC unroll 16
                for (int i = first; i < R; i++)
#pragma GCC unroll 4
                    for (int l = 0; l < C; l++) acc[l] += by[i] * S[i][l];
#pragma GCC unroll 4
                for (int l = 0; l < C; l++) store(to + l * VL, acc[l]);
            };
            if (alone) reads(by, to);
            for (int group = 0; !alone && group < groups; group++) reads(by + group * next_read, to + group * next_out);
        }
        at = state;
#pragma GCC unroll 16
        for (int i = 0; i < R; i++, at += stride)
#pragma GCC unroll 4
            for (int l = 0; l < C; l++) store(at + l * VL, S[i][l]);
    }

    // `between` is called before every tile of several rows.
    template <bool alone, class Between>
    void tiles(int rows, int columns, float *state, ptrdiff_t stride, Between &&between) const {
        int j = 0;
        auto strips = [&](auto count) __attribute__((always_inline)) {
            constexpr int C = decltype(count)::value, R = VL == 16 ? (C == 4 ? 4 : 8) : 4;
            for (; j + C * VL <= columns; j += C * VL) {
                int r = 0;
                if (R <= rows) between(), tile<R, C, true, alone>(0, j, state, stride), r = R;
                else tile<1, C, true, alone>(0, j, state, stride), r = 1;
                for (; r + R <= rows; r += R) between(), tile<R, C, false, alone>(r, j, state, stride);
                for (; r < rows; r++) tile<1, C, false, alone>(r, j, state, stride);
            }
        };
        strips(Constant<COLUMNS>()), strips(Constant<2>()), strips(Constant<1>());
    }

    template <class Between>
    void run(int rows, int columns, float *state, ptrdiff_t stride, Between &&between) const {
        if (groups == 1) tiles<true>(rows, columns, state, stride, between);
        else tiles<false>(rows, columns, state, stride, between);
    }
};

// Exchanges every second block of S lanes of `a` with the block before it of `b`.
template <int S>
__attribute__((always_inline)) static inline void exchange_blocks(vec &a, vec &b) {
    ivec low, high;
    for (int l = 0; l < VL; l++) {
        low[l] = l & S ? VL + l - S : l;
        high[l] = l & S ? VL + l : l + S;
    }
    const vec first = shuffled(a, b, low);
    b = shuffled(a, b, high);
    a = first;
}

// One step of the transpose of a VL x VL tile: exchanges its off-diagonal blocks of size S. Steps 1, 2, 4, ... transpose it.
template <int S>
static inline void exchange(vec *v) {
    for (int i = 0; i < VL; i++)
        if (!(i & S)) exchange_blocks<S>(v[i], v[i + S]);
}

// to = from transposed; rows and columns are multiples of VL.
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

// Copies rows of `width` floats to rows of `ldt`, filled up with zeros.
static void copy_rows(int rows, int width, const float *from, float *to, int ldt) {
    for (int i = 0; width && i < rows; i++) {  // width 0: linear reads keep no keys, and `from` may be null
        memcpy(to + i * ldt, from + (size_t)i * width, width * sizeof(float));
        for (int j = width; j < ldt; j++) to[i * ldt + j] = 0;
    }
}

// Rows as whole vectors: `from` itself if its rows are that already, else a copy in `to`, filled up with `fill`.
static const float *padded(int rows, int width, const float *from, float *to, int ldt, float fill) {
    if (width == ldt) return from;
    for (int i = 0; i < rows; i++) {
        memcpy(to + i * ldt, from + (size_t)i * width, width * sizeof(float));
        for (int j = width; j < ldt; j++) to[i * ldt + j] = fill;
    }
    return to;
}
