// A linear layer for few rows, as in a decoding step: y = (x W^T) scale + bias, W as it lies (o i), in fp32 or int8.
// The weights are read once, which is what takes the time. Four outputs of VL / 4 rows are a tile: its VL accumulators run along
// i, so that neither x nor W has to be laid out anew, and end as the lanes of one vector.

enum { TILE_ROWS = VL / 4, TILE_OUTPUTS = 4 };

static inline vec load_weights(const float *p) { return load(p); }
static inline vec load_weights(const int8_t *p) {
#if VL == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif VL == 8
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vec found;
    for (int l = 0; l < VL; l++) found[l] = p[l];
    return found;
#endif
}

// The last numbers of a row, fewer than a vector, and zeros.
template <class T>
static inline vec load_last(const T *p, int64_t count) {
    vec found = {};
    for (int64_t l = 0; l < count; l++) found[l] = p[l];
    return found;
}

// The sums of VL vectors, as the lanes of one: as a transpose, of which each step adds what it has exchanged.
template <int S>
static inline void add_halves(vec *v) {
    for (int i = 0; i < S; i++) exchange_blocks<S>(v[i], v[i + S]), v[i] += v[i + S];
}
static inline vec sums(vec *v) {
    if (VL > 8) add_halves<8 % VL>(v);
    if (VL > 4) add_halves<4 % VL>(v);
    add_halves<2>(v);
    add_halves<1>(v);
    return v[0];
}

// R rows of x times O rows of W: their products, row by row, in `found`. Meanwhile a cache line for each vector is fetched from
// `ahead`, where the next outputs' weights lie.
template <int R, int O, class T>
__attribute__((always_inline)) static inline const char *tile_of_linear(int64_t width, const float *x, const T *w, const char *ahead,
                                                                        float *found) {
    vec acc[R * O] = {};
    auto add = [&](auto &&load_x, auto &&load_w) __attribute__((always_inline)) {
        vec right[O];
#pragma GCC unroll 4
        for (int o = 0; o < O; o++) right[o] = load_w(w + o * width);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const vec left = load_x(x + r * width);
#pragma GCC unroll 4
            for (int o = 0; o < O; o++) acc[r * O + o] += left * right[o];
        }
    };
    int64_t i = 0;
    for (; i + VL <= width; i += VL, x += VL, w += VL, ahead += 64) {
        __builtin_prefetch(ahead, 0, 2);
        add([](const float *p) { return load(p); }, [](const T *p) { return load_weights(p); });
    }
    if (const int64_t rest = width - i)
        add([=](const float *p) { return load_last(p, rest); }, [=](const T *p) { return load_last(p, rest); });
    if (R * O == VL) store(found, sums(acc));
    else
        for (int j = 0; j < R * O; j++) found[j] = sum(acc[j]);
    return ahead;
}

template <int O, class T>
static void outputs_of_linear(const Linear *a, int64_t first, const T *w, const void *next) {
    const char *ahead = (const char *)next;
    float found[VL];
    auto tiles = [&](int64_t row, auto rows) __attribute__((always_inline)) {
        constexpr int R = decltype(rows)::value;
        for (; row + R <= a->count; row += R) {
            ahead = tile_of_linear<R, O>(a->inputs, a->x + row * a->inputs, w, ahead, found);
            for (int r = 0; r < R; r++)
                for (int o = 0; o < O; o++) {
                    const float y = found[r * O + o] * (a->scale ? a->scale[first + o] : 1.0f);
                    a->y[(row + r) * a->outputs + first + o] = a->bias ? y + a->bias[first + o] : y;
                }
        }
        return row;
    };
    tiles(tiles(0, Constant<TILE_ROWS>()), Constant<1>());
}

// Four outputs of all rows, or the fewer that are last. Of several rows, weights in int8 are converted once.
template <int O>
static void block_of_linear(const Linear *a, int64_t first, float *scratch) {
    const int64_t width = a->inputs;
    if (a->weight) return outputs_of_linear<O>(a, first, a->weight + first * width, a->weight + (first + O) * width);
    const int8_t *whole = a->whole + first * width;
    if (a->count <= TILE_ROWS) return outputs_of_linear<O>(a, first, whole, whole + O * width);
    int64_t i = 0;
    for (; i + VL <= O * width; i += VL) store(scratch + i, load_weights(whole + i));
    for (; i < O * width; i++) scratch[i] = whole[i];
    outputs_of_linear<O>(a, first, scratch, whole + O * width);
}

static void linear_block(const Linear *a, int64_t block, float *scratch) {
    const int64_t first = block * TILE_OUTPUTS, last = a->outputs - first;
    if (last >= TILE_OUTPUTS) return block_of_linear<TILE_OUTPUTS>(a, first, scratch);
    for (int64_t o = 0; o < last; o++) block_of_linear<1>(a, first + o, scratch);
}

static size_t linear_scratch(const Linear *a) { return a->whole ? TILE_OUTPUTS * a->inputs : 1; }
