// log f of a gate for each slot, f = sigmoid(logit)^(1/exponent), and its gradient: one pass over memory each way.
//     log f = (min(z, 0) - log(1 + exp(-|z|))) / exponent,      d log f / dz = (1 - f^exponent) / exponent
// log f lies as the passes want it, row by row. The logit and its gradient lie as they come from a projection: the tokens of
// a row are `token` floats apart.

static inline vec log_keep_of(vec logit, float by) {
    const ivec negative = logit < (vec){};
    return ((negative ? logit : (vec){}) - vlog1p(vexp<true>(negative ? logit : -logit))) * by;
}

static inline vec d_logit_of(vec log_keep, vec d_log_keep, float exponent, float by) {
    const vec found = d_log_keep * forgotten(log_keep * exponent) * by;
    return log_keep == log_keep ? found : log_keep;
}

static void gate_row(const Gate *a, int64_t row, float *) {
    const int64_t offset = row / a->heads * a->batch + row % a->heads * a->head, first = row * a->t * a->n;
    const bool joined = a->token == a->n;
    const int64_t lines = joined ? 1 : a->t, width = joined ? a->t * a->n : a->n;
    const float exponent = a->exponent, by = 1 / exponent;
    for (int64_t line = 0; line < lines; line++) {
        const int64_t there = offset + line * a->token, here = first + line * a->n;
        auto pass = [&](const float *log_keep, const float *from, float *to) __attribute__((always_inline)) {
            auto at = [&](const float *known, const float *given) __attribute__((always_inline)) {
                return a->d_logit ? d_logit_of(load(known), load(given), exponent, by) : log_keep_of(load(given), by);
            };
            int64_t j = 0;
            for (; j + VL <= width; j += VL) store(to + j, at(log_keep + j, from + j));
            if (j == width) return;
            float known[VL] = {}, given[VL] = {};
            memcpy(known, log_keep + j, a->d_logit ? (width - j) * sizeof(float) : 0);
            memcpy(given, from + j, (width - j) * sizeof(float));
            store(given, at(known, given));
            memcpy(to + j, given, (width - j) * sizeof(float));
        };
        if (a->d_logit) pass(a->log_keep + here, a->d_log_keep + here, a->d_logit + there);
        else pass(a->log_keep + here, a->logit + there, a->log_keep + here);
    }
}
