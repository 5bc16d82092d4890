// What a call must satisfy so that every access lies inside its arrays, whatever the numbers in them are. native.py has checked
// the same; a number that comes this far and reaches outside is a mistake there. The ordinary build refuses the call (or takes
// the nearest number that is inside), a sanitized build stops, so that tests find the mistake.

enum { DONE = 0, NO_MEMORY = 1, OUT_OF_BOUNDS = 2 };

#ifdef __SANITIZE_ADDRESS__
static bool expect(bool holds) {
    if (!holds) abort();
    return true;
}
#else
static bool expect(bool holds) { return holds; }
#endif

// Offsets inside one row's scratch memory are ints.
static bool is_int(double count) { return count < 2147483648.0; }
static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t between(int64_t low, int64_t x, int64_t high) { return x < low ? low : x > high ? high : x; }

// An empty tensor has no address.
static bool there(const void *tensor, int64_t count) { return tensor || !count; }

// The sizes alone: what the scratch memory and the checkpoints are computed from.
static bool fits(const Args *a) {
    if (a->rows < 0 || a->g < 1 || a->t < 1 || a->n < 1 || a->d < 0 || a->e < 0 || a->queries < 0 || a->threads < 1) return false;
    if (a->causal && a->queries != a->t) return false;
    const double width = largest(a->d, a->e) + 16.0, slots = a->n + 16.0;
    return is_int(slots * (width + 6 * SPAN)) && is_int(a->g * 32.0 * (slots + width + 1));
}

static bool inside(const Args *a) {
    if (!expect(fits(a))) return false;
    const int64_t rows = a->rows, slots = rows * a->n, keys = slots * a->d, values = slots * a->e;
    const int64_t of_queries = rows * a->g * a->queries;
    const bool of_slots = a->decay_width == a->n, of_head = a->mean && a->decay_width == 1;
    const bool decays = !a->log_decay || (a->causal && (of_slots || of_head));
    bool found = decays && there(a->q, of_queries * (a->linear ? a->n : a->d)) && there(a->k, rows * a->d) && there(a->v, rows * a->e) &&
                 there(a->phi, a->mean && a->log_decay ? 0 : slots);
    if (!a->backward)
        found = found && there(a->old_k, keys) && there(a->old_v, values) && there(a->old_mass, slots) &&
                there(a->old_used, slots) && there(a->old_total, a->mean ? slots : 0) && there(a->memory_k, keys) &&
                there(a->memory_v, values) && there(a->mass, slots) && there(a->used, slots) &&
                there(a->log_total, a->mean ? slots : 0) && there(a->out, of_queries * a->e);
    else {
        found = found && there(a->d_out, of_queries * a->e) && there(a->d_memory_k, keys) && there(a->d_memory_v, values) &&
                there(a->d_mass, slots) && there(a->d_q, of_queries * (a->linear ? a->n : a->d)) && there(a->d_k, rows * a->d) &&
                there(a->d_v, rows * a->e) && there(a->d_phi, a->phi ? slots : 0) &&
                there(a->d_log_decay, a->log_decay ? rows * a->decay_width : 0) &&
                there(a->d_log_total, a->mean ? slots : 0) && there(a->scores, a->linear ? 0 : of_queries) &&
                there(a->lse, a->linear ? 0 : of_queries);
        found = found && (a->causal ? there(a->checkpoints, rows)
                                    : there(a->old_k, keys) && there(a->old_v, values) && there(a->old_mass, slots) &&
                                          there(a->old_total, slots) && there(a->memory_k, keys) && there(a->memory_v, values) &&
                                          there(a->mass, slots) && there(a->log_total, slots));
    }
    return expect(found);
}

static bool inside(const Ring *a) {
    const bool sizes = a->rows >= 0 && a->heads >= 1 && a->g >= 1 && a->n >= 1 && a->d >= 16 && a->e >= 16 && !(a->d % 16) &&
                       !(a->e % 16) && a->sinks >= 0 && a->sinks <= a->n && a->threads >= 1 && a->rows % a->heads == 0;
    if (!expect(sizes && is_int(4 * (a->n + 16.0)))) return false;
    if (!a->rows) return true;
    if (!expect(a->q && a->k && a->v && a->at && a->memory_k && a->memory_v && a->out)) return false;
    bool found = true;
    for (int64_t i = 0; i < a->rows / a->heads; i++) found = found && a->at[i] >= 0 && a->at[i] < a->n;
    return expect(found);
}

static bool inside(const Band *a) {
    const bool sizes = a->rows >= 0 && a->heads >= 1 && a->g >= 1 && a->t >= 0 && a->lead >= 0 && a->window >= 1 && a->sinks >= 0 &&
                       a->d >= 16 && a->e >= 16 && !(a->d % 16) && !(a->e % 16) && a->threads >= 1 && a->rows % a->heads == 0;
    if (!expect(sizes)) return false;
    const double all = (double)a->lead + a->t, most = a->window + (double)BAND_CHUNK;
    if (!expect(is_int((a->sinks + 32.0 + (most < all ? most : all)) * (2.0 * a->d + a->e + 32)))) return false;
    if (!a->rows || !a->t) return true;
    return expect(a->q && a->k && a->v && a->missing && a->count && a->out && there(a->sink_k, a->sinks) && there(a->sink_v, a->sinks));
}

static bool inside(const Gate *a) {
    const bool sizes = a->rows >= 0 && a->heads >= 1 && a->t >= 1 && a->n >= 1 && a->threads >= 1 && a->exponent > 0 &&
                       a->rows % a->heads == 0 && a->batch >= 0 && a->head >= 0 && a->token >= 0;
    if (!expect(sizes)) return false;
    return expect(!a->rows || (a->log_keep && (a->d_logit ? !!a->d_log_keep : !!a->logit)));
}

static bool inside(const Linear *a) {
    const bool sizes = a->count >= 0 && a->outputs >= 0 && a->inputs >= 0 && a->threads >= 1 && a->rows == (a->outputs + 3) / 4;
    if (!expect(sizes && is_int(4.0 * a->inputs))) return false;
    const int64_t x = a->count * a->inputs, weights = a->outputs * a->inputs;
    return expect(there(a->x, x) && there(a->weight ? (const void *)a->weight : a->whole, weights) && there(a->y, a->count * a->outputs));
}
