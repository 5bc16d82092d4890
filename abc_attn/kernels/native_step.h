// One decoding step (one token, no gradient): memory_t = exp(log_decay_t) memory_{t-1} + phi_t (x) [k_t, v_t, 1], then the
// read (eq. 3 to 5; docs/maths.md, "One write rule, two reads"). The old memory is read, the new one written beside it.
static void step_row(const Args *a, int64_t row, float *scratch) {
    Row w;
    w.sizes(a);
    const int n = w.n, d = w.d, e = w.e, np = w.np;
    float *r = scratch, *share = r + np, *kept = share + np, *change = kept + np, *p = change + np, *ob = p + np;
    const float *phi = a->phi ? a->phi + row * n : nullptr, *ld = a->log_decay ? a->log_decay + row * a->decay_width : nullptr;
    const uint8_t *was_used = a->old_used + row * n, *readable = a->readable ? a->readable + row * n : nullptr;
    uint8_t *used = a->used + row * n;
    // 1. The share of the token that enters each slot (phi_t) and the logarithm of what the slot keeps (r = log_decay_t).
    if (a->mean) {
        // Running mean (B.1): A_t = A_{t-1} + exp(logit), phi_t = exp(logit) / A_t, log_decay_t = log A_{t-1} - log A_t.
        // One that forgets, f = exp(log_decay): f A_{t-1} stands for A_{t-1}, and (1 - f) exp(logit) for exp(logit).
        // log A_t = the larger of the two logarithms (fp64) + log1p(exp(smaller - larger)), which is small: fp32 will do.
        const double *old = a->old_total + row * n;
        auto decay = [&](int j) { return ld[a->decay_width == 1 ? 0 : j]; };
        auto before = [&](int j) { return ld ? old[j] + decay(j) : old[j]; };
        if (ld) {
            for (int j = 0; j < np; j++) ob[j] = j < n ? decay(j) : 0;
            for (int j = 0; j < np; j += VL) store(ob + j, log_forgotten(load(ob + j)));
            for (int j = 0; phi && j < n; j++) ob[j] += phi[j];
            phi = ob;
        }
        for (int j = 0; j < np; j++) {
            const double high = j >= n ? -INFINITY : before(j) > phi[j] ? before(j) : phi[j];
            r[j] = high == -INFINITY ? -INFINITY : (float)(before(j) - high);
            share[j] = high == -INFINITY ? -INFINITY : (float)(phi[j] - high);
        }
        for (int j = 0; j < np; j += VL) {
            vec low = load(r + j) < load(share + j) ? load(r + j) : load(share + j);  // the larger one is 0
            store(change + j, vlog1p(vexp(low)));
        }
        for (int j = 0; j < n; j++) {
            const double high = before(j) > phi[j] ? before(j) : phi[j];
            a->log_total[row * n + j] = high + change[j];
            used[j] = was_used[j] || phi[j] > -INFINITY;
        }
        for (int j = 0; j < np; j += VL) {
            store(r + j, load(r + j) - load(change + j));
            store(share + j, vexp(load(share + j) - load(change + j)));
        }
    } else
        for (int j = 0; j < n; j++) {
            r[j] = ld ? ld[j] : 0, share[j] = phi[j];
            used[j] = (was_used[j] && r[j] != -INFINITY) || phi[j] != 0;
        }
    // 2. What stays of a slot, exp(r), as kept + change with kept 0 or 1: a mild decay is then old + (old * change + new),
    //    in which fp32 does not round 1 - small. For a running mean the change is exactly -phi_t.
    for (int j = 0; j < np; j += VL) {
        vec left = vexp(load(r + j)), one = splat(1.0f);
        ivec mild = left > splat(0.5f);
        store(kept + j, mild ? one : (vec){});
        store(change + j, mild ? (a->mean ? -load(share + j) : left - one) : left);
    }
    // 3. Write: keys, values and mass (eq. 5)
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
    // 4. Read, for each query head of the group
    for (int64_t group = 0; group < a->g; group++) {
        const int64_t at = row * a->g + group;
        const float *q = a->q + at * (a->linear ? n : d);
        // 4a. Linear: weights p = f(q), denominator f(q) . mass. Softmax: scores K q.
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
        if (a->linear && a->floor) den = fmaxf(den, a->floor);
        if (!a->linear) {  // 4b. Softmax weights and their sum
            for (int i = n; i < np; i++) p[i] = -INFINITY;
            vec total = {};
            for (int i = 0; i < np; i += VL) {
                vec weight = vexp<true>(load(p + i) - (best == -INFINITY ? 0 : best));
                total += weight;
                store(p + i, weight);
            }
            den = sum(total);
        }
        // 4c. Output: p . V / denominator (eq. 4)
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
