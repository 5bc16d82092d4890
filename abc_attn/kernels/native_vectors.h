// Vectors of VL floats and what is made of them: exp, products of small matrices in tiles, transposes.
// native.cpp includes this file, and those that build on it, once per instruction set.

typedef float vec __attribute__((vector_size(4 * VL), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * VL), aligned(4)));

static inline vec load(const float *p) { return *(const vec *)p; }
static inline void store(float *p, vec x) { *(vec *)p = x; }
static inline vec splat(float x) { return x - (vec){}; }
#if VL == 16
static inline vec vmax(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
#else
static inline vec vmax(vec a, vec b) { return a > b ? a : b; }
#endif

// Lanes of a (0 to VL - 1) and of b (VL and on) in the given order.
__attribute__((always_inline)) static inline vec shuffled(vec a, vec b, ivec order) {
#ifdef __clang__  // which sees through the loop, and has no shuffle by a vector
    vec found;
    for (int l = 0; l < VL; l++) found[l] = order[l] < VL ? a[order[l]] : b[order[l] - VL];
    return found;
#else
    return __builtin_shuffle(a, b, order);
#endif
}

// x with its lanes turned by S: the step of a reduction over lanes.
template <int S>
static inline vec turned(vec x) {
    ivec order;
    for (int l = 0; l < VL; l++) order[l] = (l + S) % VL;
    return shuffled(x, x, order);
}

__attribute__((always_inline)) static inline float sum(vec x) {
    if (VL > 8) x += turned<8 % VL>(x);
    if (VL > 4) x += turned<4 % VL>(x);
    x += turned<2>(x);
    x += turned<1>(x);
    return x[0];
}

__attribute__((always_inline)) static inline float highest(vec x) {
    if (VL > 8) x = vmax(x, turned<8 % VL>(x));
    if (VL > 4) x = vmax(x, turned<4 % VL>(x));
    x = vmax(x, turned<2>(x));
    x = vmax(x, turned<1>(x));
    return x[0];
}

// exp to about one ulp, 0 below -87 (-inf too), exactly 1 at 0.
__attribute__((always_inline)) static inline vec vexp(vec x) {
    const vec low = splat(-87.0f), magic = splat(12582912.0f);
#if VL == 16
    const __mmask16 real = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_GE_OQ);
#else
    ivec under = x < low;
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
    return under ? (vec){} : (vec)bits;
#endif
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

static inline vec over(vec x, float den) { return den == 0 ? (vec){} : x / den; }

// 1 / x to about one ulp.
static inline vec reciprocal(vec x) {
#if VL == 16
    vec y = (vec)_mm512_rcp14_ps((__m512)x);  // one step of Newton's takes a quarter of a division's time
    return y + y * (1.0f - x * y);
#else
    return 1.0f / x;
#endif
}

// C (M x N) = A B, or added to C. A_ik stands at a[i * row + k * step]; B and C are rows of whole vectors.
// A triangle is never multiplied out: LOWER takes A as zero right of the diagonal, UPPER as zero left of it, and CORNER
// leaves out what of C lies right of the diagonal (`lower` below then clears it).
enum Shape { WHOLE, LOWER, UPPER, CORNER };

template <int N>
struct Number {
    static constexpr int value = N;
};

// A tile's accumulators, a row of B and one element of A fill the registers.
static constexpr int rows_of_tile(int columns) {
    return VL == 16 ? (columns == 4 ? 6 : columns == 2 ? 8 : 16) : columns == 2 ? 6 : 8;
}

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

// `between` is done before every tile.
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
                for (; i + R <= M && !(R == 6 && M - i == 8); i += R) {  // 8 as 4 + 4: two rows make a poor tile
                    if (shape == CORNER && j >= i + R) continue;
                    between();
                    int from = shape == UPPER ? i : 0, to = shape == LOWER ? i + R : K;
                    tile<R, C, add>(to - from, a + i * row + from * step, row, step, b + from * ldb + j, ldb,
                                    c + i * ldc + j, ldc);
                }
            };
            tiles(Number<rows_of_tile(C)>()), tiles(Number<4>()), tiles(Number<2>()), tiles(Number<1>());
        }
    };
    strips(Number<COLUMNS>()), strips(Number<2>()), strips(Number<1>());
}

// The recurrence of a piece: S_r += row_tr column_t, then out_t = sum_r read_tr S_r, for one token t after the other. S is
// rows of whole vectors; `groups` reads lie `next_read` apart, and what they find `next_out`.
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

    // A tile of S stays in registers while all tokens pass, so nothing is multiplied but what the recurrence asks for.
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

    // `between` is done before every tile of several rows.
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
        strips(Number<COLUMNS>()), strips(Number<2>()), strips(Number<1>());
    }

    template <class Between>
    void run(int rows, int columns, float *state, ptrdiff_t stride, Between &&between) const {
        if (groups == 1) tiles<true>(rows, columns, state, stride, between);
        else tiles<false>(rows, columns, state, stride, between);
    }
};

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
            v[i] = shuffled(a, b, low);
            v[i + S] = shuffled(a, b, high);
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
    for (int i = 0; width && i < rows; i++) {  // linear reads keep no keys
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
