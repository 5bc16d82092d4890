// Fused CPU kernels of the bounded memory, without torch's headers: plain pointers in, plain pointers out.
// Every tensor is contiguous fp32, except log_total (fp64), used and readable (bytes); native.py makes sure of that.
//
// Axes: t tokens, n slots, d key width, e value width. A row is a batch element and a key head: it has one memory.
//     native_vectors.h    vectors, exp, matrix products, transposes       native_step.h   one decoding step
//     native_row.h        the sums of a row, a chunk's coefficients       native_ring.h   one decoding step of a window
//     native_forward.h    the forward pass, chunk by chunk                native_band.h   windows over many tokens
//     native_backward.h   the backward pass                               native_gate.h   what a gate keeps, from its logit
//     native_linear.h     a linear layer for few rows
//     native_bounds.h     what a call must satisfy for every access to lie inside its arrays

#include <dlfcn.h>
#ifdef __linux__
#include <sys/mman.h>
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#ifdef __x86_64__
#include <immintrin.h>
#endif

struct Args {
    int64_t rows, g, t, n, d, e, queries;  // rows = batch * key heads; g query heads share each
    int64_t decay_width;  // of log_decay: n, or 1 where a running mean decays all slots of a head alike
    int64_t mean, linear, mask_empty, causal, backward, threads;
    int64_t checkpoint_floats;  // in `checkpoints`
    float scale, floor;  // floor: least denominator of a linear read; 0: none
    const float *q, *k, *v, *phi, *log_decay;  // phi: of a running mean its log-weights; null: zeros
    const uint8_t *readable;
    const float *old_k, *old_v, *old_mass;  // the memory before the first token
    const uint8_t *old_used;
    const double *old_total;
    float *memory_k, *memory_v, *mass;  // ... and after the last
    uint8_t *used;
    double *log_total;
    float *out, *scores, *lse, *checkpoints;  // lse: log-sum-exp of the scores
    // backward only
    const float *d_out, *d_lse;
    float *d_memory_k, *d_memory_v, *d_mass;  // in: gradient of the memory after; out: of that before
    double *d_log_total;
    float *d_q, *d_k, *d_v, *d_phi, *d_log_decay;
};

// One decoding step of a window (native_ring.h): a token for every row. fp32; d and e are multiples of 16.
struct Ring {
    int64_t rows, heads, g, n, d, e, sinks, threads;
    float scale;
    const float *q, *to_sinks, *k, *v;  // to_sinks: the query for the first `sinks` slots, or null
    const int64_t *at;                  // the slot that the token replaces, one for every `heads` rows
    const uint8_t *used;                // rows n   slots that are read; null: all
    float *memory_k, *memory_v, *out;
};

// Causal attention over a band (native_band.h): each query reads the last `window` keys up to its own, and the sinks. fp32; d
// and e are multiples of 16.
struct Band {
    int64_t rows, heads, g, t, lead, window, sinks, d, e, threads;
    float scale;
    const float *q, *to_sinks, *sink_k, *sink_v, *k, *v;  // k and v start `lead` tokens before q
    const int64_t *missing, *count;                       // b   keys at the start that are empty; tokens read before this call
    float *out;
};

// What a gate keeps, from its logit; with d_logit the gradient (native_gate.h). A row is a batch element and a head.
struct Gate {
    int64_t rows, heads, t, n;
    int64_t batch, head, token;  // the strides of the logit, or of its gradient
    int64_t threads;
    float exponent;
    const float *logit;
    float *log_keep;  // b h t n, contiguous
    const float *d_log_keep;
    float *d_logit;
};

// A linear layer for few rows (native_linear.h): y = (x W^T) scale + bias.
struct Linear {
    int64_t rows;  // blocks of four outputs, the last one perhaps with fewer
    int64_t count, outputs, inputs, threads;  // count: rows of x and y
    const float *x, *weight;  // W `o i` in fp32, or null and ...
    const int8_t *whole;      // ... in int8
    const float *scale, *bias;  // `o`, or null
    float *y;
};

static const float GONE = -87.0f;  // exp(GONE) is about ...
static const float LEAST = 1.17549435e-38f;  // ... the smallest normal number of fp32
// What a chunk may hold, in nats. Decays are undone by their inverses (N3), which rounding limits. In a running mean (N2) only
// the range of fp32, e^87, does: sums may be as small as e^-MOST_SPAN and are divided by. Of that 8 are for a top that stays and
// the rest for weights that differ. Slots with a half-life of one token forget 22 nats in 32 tokens.
static const float MOST_DECAYED = 16.0f, MOST_FADED = 32.0f, MOST_SPAN = 48.0f;
enum { SPAN = 256, PAGE = 1024 };  // tokens between checkpoints; floats in a page of 4 kB
enum { BAND_CHUNK = 96 };  // queries of a band that one thread takes at once

// One token without gradients, as in decoding.
static bool is_step(const Args *a) { return a->causal && a->t == 1 && !a->backward && !a->checkpoints; }

#include "native_bounds.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VL 16
#define COLUMNS 4
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,fma,prefer-vector-width=512")
namespace avx512 {
#include "native_vectors.h"
#include "native_row.h"
#include "native_forward.h"
#include "native_step.h"
#include "native_backward.h"
#include "native_ring.h"
#include "native_band.h"
#include "native_gate.h"
#include "native_linear.h"
}
#pragma GCC pop_options
#undef VL
#undef COLUMNS
#define VL 8
#define COLUMNS 2
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#include "native_vectors.h"
#include "native_row.h"
#include "native_forward.h"
#include "native_step.h"
#include "native_backward.h"
#include "native_ring.h"
#include "native_band.h"
#include "native_gate.h"
#include "native_linear.h"
}
#pragma GCC pop_options
#undef VL
#undef COLUMNS
#endif

#define VL 4
#define COLUMNS 2
namespace portable {
#include "native_vectors.h"
#include "native_row.h"
#include "native_forward.h"
#include "native_step.h"
#include "native_backward.h"
#include "native_ring.h"
#include "native_band.h"
#include "native_gate.h"
#include "native_linear.h"
}

typedef void (*Pass)(const Args *, int64_t, float *);

struct Kind {
    const char *name;
    Pass forward, forward_whole, backward, backward_whole, step;
    size_t (*scratch)(const Args *);
    int64_t (*checkpoints)(const Args *);
    void (*ring)(const Ring *, int64_t, float *);
    size_t (*ring_scratch)(const Ring *);
    void (*band)(const Band *, int64_t, float *);
    size_t (*band_scratch)(const Band *);
    void (*gate)(const Gate *, int64_t, float *);
    void (*linear)(const Linear *, int64_t, float *);
    size_t (*linear_scratch)(const Linear *);
};

#define KIND(isa)                                                                                             \
    {#isa, isa::forward_row, isa::forward_whole, isa::backward_row, isa::backward_whole, isa::step_row, isa::scratch_floats, \
     isa::checkpoint_floats, isa::ring_row, isa::ring_scratch, isa::band_chunk, isa::band_scratch, isa::gate_row,  \
     isa::linear_block, isa::linear_scratch}

// Every vector width that was compiled, widest first; `runs` says whether this CPU has its instructions.
struct Width {
    Kind kind;
    bool (*runs)();
};

static const Width WIDTHS[] = {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    {KIND(avx512), [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     }},
    {KIND(avx2), [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {KIND(portable), [] { return true; }},
};

static const Kind *best() {
    for (const Width &width : WIDTHS)
        if (width.runs()) return &width.kind;
    return nullptr;  // never: the portable width runs everywhere
}

static std::atomic<const Kind *> &chosen() {
    static std::atomic<const Kind *> current{best()};
    return current;
}

static const Kind &kind() { return *chosen().load(std::memory_order_relaxed); }

// torch has loaded an OpenMP runtime into this process. Its threads are used: a second pool would compete for the cores.
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);

static Parallel parallel() {
    static const Parallel found = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    return found;
}

// The rows of a call, shared among threads: each takes the next `block` rows when it is done with its own.
template <class Call>
struct Team {
    const Call *args;
    void (*run)(const Call *, int64_t, float *);
    size_t scratch;  // floats
    int64_t block;   // rows to take at a time
    std::atomic<int64_t> next;
    std::atomic<int> failed;

    static void work(void *data) {
        Team *team = (Team *)data;
        // Aligned to cache lines: a vector that straddles two of them costs two loads.
        float *scratch = (float *)aligned_alloc(64, (team->scratch * sizeof(float) + 63) / 64 * 64);
        if (!scratch) {
            team->failed = 1;
            return;
        }
        const int64_t rows = team->args->rows, block = team->block;
        for (int64_t row; (row = team->next.fetch_add(block)) < rows;)
            for (int64_t stop = row + block < rows ? row + block : rows; row < stop; row++) team->run(team->args, row, scratch);
        free(scratch);
    }
};

template <class Call>
static int share_out(const Call *args, void (*run)(const Call *, int64_t, float *), size_t scratch, int64_t block) {
    Team<Call> team{args, run, scratch, block, {0}, {0}};
    int64_t threads = args->threads < args->rows ? args->threads : args->rows;
    if (threads > 1 && parallel()) parallel()(Team<Call>::work, &team, (unsigned)threads, 0);
    else Team<Call>::work(&team);
    return team.failed ? NO_MEMORY : DONE;
}

// Large results are freshly mapped memory. Mapping it in pages of 4 kB costs more time than the arithmetic: ask for pages of
// 2 MB.
static void large_pages(const float *start, int64_t count) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)1 << 21, from = ((uintptr_t)start + page - 1) & ~(page - 1);
    const uintptr_t to = (uintptr_t)(start + count) & ~(page - 1);
    if (start && to >= from + 8 * page) madvise((void *)from, to - from, MADV_HUGEPAGE);
#endif
}

extern "C" {
// Each of these returns DONE, NO_MEMORY, or OUT_OF_BOUNDS with nothing written.
int abc_run(const Args *args) {
    if (!inside(args) || (args->checkpoints && args->checkpoint_floats < kind().checkpoints(args))) return OUT_OF_BOUNDS;
    if (!args->rows) return DONE;
    const int64_t tokens = args->rows * args->t, queries = args->rows * args->g * args->queries;
    if (args->backward) {
        large_pages(args->d_q, queries * (args->linear ? args->n : args->d));
        large_pages(args->d_k, tokens * args->d), large_pages(args->d_v, tokens * args->e);
        large_pages(args->d_phi, args->phi ? tokens * args->n : 0);
        large_pages(args->d_log_decay, args->log_decay ? tokens * args->decay_width : 0);
    } else {
        large_pages(args->out, queries * args->e), large_pages(args->scores, queries * args->n);
        large_pages(args->checkpoints, args->checkpoints ? kind().checkpoints(args) : 0);
    }
    const Kind &use = kind();
    Pass run = is_step(args)    ? use.step
               : args->backward ? (args->causal ? use.backward : use.backward_whole)
                                : (args->causal ? use.forward : use.forward_whole);
    // Steps are short, and neighbouring rows lie side by side in memory: blocks of them. Passes are long: one row at a time, so
    // that all threads finish at about the same time.
    const int64_t block = is_step(args) ? (args->rows + 4 * args->threads - 1) / (4 * args->threads) : 1;
    return share_out(args, run, use.scratch(args), block);
}
int abc_band(const Band *args) {
    if (!inside(args)) return OUT_OF_BOUNDS;
    if (!args->rows || !args->t) return DONE;
    Band chunks = *args;
    chunks.rows *= (args->t + BAND_CHUNK - 1) / BAND_CHUNK;
    return share_out(&chunks, kind().band, kind().band_scratch(args), 1);
}
int abc_gate(const Gate *args) {
    if (!inside(args)) return OUT_OF_BOUNDS;
    large_pages(args->d_logit ? args->d_logit : args->log_keep, args->rows * args->t * args->n);
    return args->rows ? share_out(args, kind().gate, 16, 1) : DONE;
}
int abc_linear(const Linear *args) {
    if (!inside(args)) return OUT_OF_BOUNDS;
    const int64_t block = (args->rows + 4 * args->threads - 1) / (4 * args->threads);
    return args->rows ? share_out(args, kind().linear, kind().linear_scratch(args), block) : DONE;
}
int abc_ring(const Ring *args) {
    if (!inside(args)) return OUT_OF_BOUNDS;
    return args->rows ? share_out(args, kind().ring, kind().ring_scratch(args), 1) : DONE;
}

// RoPE for one token per batch element: x cos + (x with its halves swapped) sin, for every head. The sign is in `sin`.
void abc_rotate(int64_t batch, int64_t heads, int64_t d, const float *x, const float *cos, const float *sin, float *out) {
    const int64_t half = d / 2;
    for (int64_t row = 0; row < batch * heads; row++, x += d, out += d) {
        const float *c = cos + row / heads * d, *s = sin + row / heads * d;
        for (int64_t i = 0; i < half; i++) {
            out[i] = x[i] * c[i] + x[half + i] * s[i];
            out[half + i] = x[half + i] * c[half + i] + x[i] * s[half + i];
        }
    }
}
// The vector width in use; those that this machine has, widest first (null after the last).
const char *abc_kind() { return kind().name; }
const char *abc_kind_at(int index) {
    for (const Width &width : WIDTHS)
        if (width.runs() && index-- == 0) return width.kind.name;
    return nullptr;
}
// Use the vector width of this name; nonzero, and nothing changed, where this machine has none of that name. Not to be
// called while a pass runs or waits for its backward pass: checkpoints are laid out by the width that wrote them.
int abc_use(const char *name) {
    for (const Width &width : WIDTHS)
        if (width.runs() && !strcmp(width.kind.name, name)) {
            chosen().store(&width.kind, std::memory_order_relaxed);
            return 0;
        }
    return 1;
}
int64_t abc_checkpoint_floats(const Args *args) { return fits(args) ? kind().checkpoints(args) : 0; }
int abc_threads() { return parallel() != nullptr; }
}
