#include "forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "buffers.h"
#include "linear.h"
#include "lora.h"
#include "octets.h"
#include "pool.h"
#include "simd.h"
#include "tiles.h"

namespace folio {
namespace {

// x / sqrt(mean(x²) + eps) · weight, in place or not.
void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
    vf squares = vzero();
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares = vfma(vload(x + i), vload(x + i), squares);
    float sum = vsum(squares);
    for (; i < size; i++) sum += x[i] * x[i];
    float factor = 1.0f / std::sqrt(sum / float(size) + eps);
    for (i = 0; i + LANES <= size; i += LANES)
        vstore(out + i, vmul(vmul(vload(x + i), vset(factor)), vload(weight + i)));
    for (; i < size; i++) out[i] = x[i] * factor * weight[i];
}

// Dimension i turns with dimension i + D/2.
void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = vload(head + i), b = vload(head + half + i), cosine = vload(cosines + i), sine = vload(sines + i);
        vstore(head + i, vfma(a, cosine, vmul(b, vsub(vzero(), sine))));
        vstore(head + half + i, vfma(b, cosine, vmul(a, sine)));
    }
    for (; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cosines[i] - b * sines[i];
        head[half + i] = b * cosines[i] + a * sines[i];
    }
}

// Tokens a thread from which on each takes lots of them through the layers, alone: nobody waits for anybody, and what one
// product makes of them is in the core's own cache when the next one reads it. Fewer are shared product by product, by
// panels of weights: each weight is then read once.
constexpr int64_t MANY = 128;
// Tokens of a lot at most and at least. Where weights are expanded, that is done for each lot.
constexpr int64_t LARGEST = EXPANDS ? 240 : 180, LEAST = EXPANDS ? 24 : OCTET_ROWS;
static_assert(LARGEST % ROWS == 0 && LEAST % ROWS == 0);

class Forward {
public:
    Forward(const FolioModel& model, const FolioStep& step, Buffers& b)
        : m_(model), s_(step), b_(b), qkv_width_((m_.num_heads + 2 * m_.num_kv_heads) * m_.head_dim),
          attended_width_(m_.num_heads * m_.head_dim) {
        int64_t n = s_.num_tokens, groups = 1, widest = std::max(m_.hidden, std::max(m_.intermediate, qkv_width_));
        for (int64_t i = 0; i < m_.num_layers; i++) groups = std::max(groups, m_.layers[i].group + 1);
        b_.lots.clear();
        // Adapters' tokens are grouped over all of a step.
        if (n >= MANY * s_.threads && !s_.lora) b_.lots.make(s_, groups, num_lots(), ROWS);
        if (int64_t(b_.plans.size()) < groups) b_.plans.resize(size_t(groups));
        for (int64_t i = 0; i < groups; i++) {
            b_.plans[size_t(i)].make(s_, s_.groups[i], m_.num_heads, m_.num_kv_heads, m_.head_dim, b_.lots);
            keeps_queries_ = keeps_queries_ && b_.plans[size_t(i)].keeps_queries();
        }
        int64_t shared = in_lots() ? 0 : n;  // tokens whose rows lie in memory that threads share
        grow(b_.x, (n + s_.num_outputs) * m_.hidden);
        grow(b_.qkv, (in_lots() && keeps_queries_ ? 0 : n) * qkv_width_);
        grow(b_.attended, (shared + s_.num_outputs) * attended_width_);
        grow(b_.activated, std::max(shared, s_.num_outputs) * m_.intermediate);
        grow(b_.angles, n * m_.head_dim);
        if (int64_t(b_.threads.size()) < s_.threads) b_.threads.resize(size_t(s_.threads));
        for (auto& each : b_.threads) {
            grow(each.line, widest), each.coming = Lines();
            grow(each.rows, b_.lots.largest() * std::max(widest, attended_width_));
        }
        if (s_.lora) {
            int64_t width = lora_width(*s_.lora, s_.lora->slots, n, m_.num_layers * LORA_LINEARS);
            b_.tokens.make(*s_.lora, s_.lora->slots, n, width);
            b_.outputs.make(*s_.lora, s_.lora->output_slots, s_.num_outputs, width);
        }
        if (!in_lots()) shape(0);
    }

    void run(Team& team, int thread) {
        if (in_lots())
            run_lots(team, thread);
        else
            run_together(team, thread);
        for (int64_t index = stages() - LORA_LINEARS + 1; index < stages(); index++) multiply(team, thread, index);
        int64_t rows = s_.num_outputs, begin, end;
        const float* x = output_x();
        while (team.take(rows, 1, begin, end))
            rms_norm(x + begin * m_.hidden, m_.norm, m_.hidden, m_.eps, s_.hidden + begin * m_.hidden);
        team.barrier();
    }

private:
    bool in_lots() const { return b_.lots.count() > 0; }

    // Lots of the largest size, or more of them, so that each thread has a second one while another has its first.
    int64_t num_lots() const {
        int64_t n = s_.num_tokens, needed = (n + LARGEST - 1) / LARGEST;
        return std::min(std::max(needed, 2 * s_.threads - 1), std::max<int64_t>(1, n / LEAST));
    }

    // Up to the last layer's attention, shared product by product.
    void run_together(Team& team, int thread) {
        int64_t begin, end;
        while (team.take(s_.num_tokens, 8, begin, end))
            for (int64_t t = begin; t < end; t++) begin_row(t);
        team.barrier();
        for (int64_t index = 0; index < stages() - LORA_LINEARS + 1; index++) {
            multiply(team, thread, index);
            if (index % LORA_LINEARS == 0) attend(team, thread, index / LORA_LINEARS);
        }
    }

    // The same, lot by lot.
    void run_lots(Team& team, int thread) {
        int64_t lots = b_.lots.count(), passes = m_.num_layers + 1, at, end;
        while (team.take(lots * passes, 1, at, end)) pass(thread, at % lots, at / lots);
        if (thread == 0) shape(stages() - LORA_LINEARS + 1);
        team.barrier();
    }

    // A lot's attention of layer `layer` − 1, and all products between that and layer `layer`'s.
    void pass(int thread, int64_t lot, int64_t layer) {
        int64_t begin = b_.lots.begin(lot), end = b_.lots.end(lot);
        if (layer == 0) {
            for (int64_t t = begin; t < end; t++) begin_row(t);
        } else {
            bool last = layer == m_.num_layers;
            float* attended = b_.threads[size_t(thread)].rows.data();
            b_.lots.wait(lot, uint32_t(layer));
            plan(layer - 1).run_lot(thread, lot, pages(layer - 1), b_.qkv.data(), qkv_width_, {attended, begin}, last);
            if (last) {
                for (int64_t i = 0; i < s_.num_outputs; i++)
                    if (int64_t token = s_.outputs[i]; begin <= token && token < end)
                        put_output(i, attended + (token - begin) * attended_width_);
                return;
            }
            for (int64_t index = (layer - 1) * LORA_LINEARS + 1; index < layer * LORA_LINEARS; index++)
                multiply_alone(thread, index, begin, end);
        }
        multiply_alone(thread, layer * LORA_LINEARS, begin, end);
        b_.lots.end_pass(lot);
    }

    void begin_row(int64_t t) {
        int64_t half = m_.head_dim / 2;
        unpack_row(m_.embed, s_.ids[t], b_.x.data() + t * m_.hidden);
        float* angles = b_.angles.data() + t * m_.head_dim;
        for (int64_t i = 0; i < half; i++) {
            float angle = float(s_.positions[t]) * m_.frequencies[i];
            angles[i] = std::cos(angle) * m_.rope_scale;
            angles[half + i] = std::sin(angle) * m_.rope_scale;
        }
    }

    // Linear `index` of the adapters, where some of `rows` has it.
    LoraAddition addition(LoraRows& rows, int64_t index) const {
        return s_.lora && rows.uses(index) ? LoraAddition{&rows, index} : LoraAddition{};
    }

    // A product with one of the model's linears: of rows, which are normalised first, if a norm is given.
    struct Stage {
        const FolioLinear& weights;
        const float* x;
        int64_t stride, rows;
        const float* norm;  // null: as they are
        LoraAddition lora;
        float* y;
        int64_t y_stride;
        Into into;
        // Threads would wait longer for each other than a row or two takes: then each prepares all of them for itself.
        bool each() const { return rows <= 2 && !lora.rows; }
    };

    int64_t stages() const { return m_.num_layers * LORA_LINEARS; }
    // After the last layer's attention only tokens whose hidden states are wanted matter: they lie behind the others.
    bool of_outputs(int64_t index) const { return index > stages() - LORA_LINEARS; }

    Stage stage(int64_t index) const {
        const FolioLayer& layer = m_.layers[index / LORA_LINEARS];
        bool outputs = of_outputs(index);
        int64_t rows = outputs ? s_.num_outputs : s_.num_tokens;
        float *x = b_.x.data(), *attended = b_.attended.data();
        if (outputs) x = output_x(), attended = output_attended();
        LoraAddition lora = addition(outputs ? b_.outputs : b_.tokens, index);
        switch (index % LORA_LINEARS) {
            case 0:
                return {layer.qkv, x, m_.hidden, rows, layer.input_norm, lora, b_.qkv.data(), qkv_width_, Into::store};
            case 1:
                return {layer.o, attended, attended_width_, rows, nullptr, lora, x, m_.hidden, Into::add};
            case 2:
                return {layer.gate_up, x, m_.hidden, rows, layer.post_norm, lora, b_.activated.data(), m_.intermediate,
                        Into::silu_mul};
            default:
                return {layer.down, b_.activated.data(), m_.intermediate, rows, nullptr, lora, x, m_.hidden, Into::add};
        }
    }

    // Memory for a stage's activations, while those of the stage before it are still read.
    void shape(int64_t index) {
        Stage next = stage(index);
        if (!next.each()) b_.activations[index % 2].shape(next.weights, next.rows, next.lora.rows != nullptr);
    }

    // Tokens `begin … end` of a stage, by one thread. What it makes is the next stage's alone, if not x: its own memory is
    // taken over and over, in the core's cache.
    void multiply_alone(int thread, int64_t index, int64_t begin, int64_t end) {
        Buffers::Thread& own = b_.threads[size_t(thread)];
        int64_t layer = index / LORA_LINEARS, of_layer = index % LORA_LINEARS, heads = m_.num_kv_heads;
        Stage now = stage(index);
        now.rows = end - begin;
        bool takes_own = of_layer == 1 || of_layer == 3, gives_own = of_layer == 2 || (of_layer == 0 && keeps_queries_);
        now.x = takes_own ? own.rows.data() : now.x + begin * now.stride;
        now.y = gives_own ? own.rows.data() : now.y + begin * now.y_stride;
        own.activations.shape(now.weights, now.rows);
        for (int64_t r = 0; r < now.rows; r++) set(own, now, r, own.activations);
        Team nobody_else(1);
        linear(nobody_else, thread, now.weights, own.activations, now.rows, now.y, now.y_stride, now.into, now.lora);
        if (of_layer == 0)
            for (int64_t i = 0; i < now.rows * heads; i++) place(layer, begin + i / heads, i % heads, now.y + i / heads * qkv_width_);
    }

    void multiply(Team& team, int thread, int64_t index) {
        Stage now = stage(index);
        const Activations& x = prepare(team, thread, index, now);
        linear(team, thread, now.weights, x, now.rows, now.y, now.y_stride, now.into, now.lora);
        Lines& coming = b_.threads[size_t(thread)].coming;
        coming = Lines();
        if (index + 1 < stages()) {
            if (thread == 0) shape(index + 1);
            Stage next = stage(index + 1);
            if (now.rows <= WAITING_ROWS) coming = first_lines(next.weights, next.into, s_.threads, thread);
        }
        team.barrier(&coming);
    }

    // Rows as the linear's formats want them; shrunk, where adapters add to it.
    const Activations& prepare(Team& team, int thread, int64_t index, const Stage& now) {
        Buffers::Thread& own = b_.threads[size_t(thread)];
        Activations& to = now.each() ? own.activations : b_.activations[index % 2];
        if (now.each()) {
            to.shape(now.weights, now.rows);
            own.coming.fetch(16);
            for (int64_t r = 0; r < now.rows; r++) set(own, now, r, to);
            return to;
        }
        int64_t begin, end;
        // Rows that lie together are one thread's: their places share lines of memory.
        while (team.take((now.rows + to.together - 1) / to.together, now.rows < 64 ? 1 : 2, begin, end))
            for (int64_t r = begin * to.together; r < std::min(end * to.together, now.rows); r++) set(own, now, r, to);
        team.barrier(&own.coming);
        if (now.lora.rows) {
            now.lora.rows->shrink(team, now.lora.index, to);
            team.barrier(&own.coming);
        }
        return to;
    }

    // Row `r` of a stage, normalised.
    void set(Buffers::Thread& own, const Stage& now, int64_t r, Activations& to) const {
        const float* from = now.x + r * now.stride;
        if (now.norm) {
            rms_norm(from, now.norm, to.k, m_.eps, own.line.data());
            from = own.line.data();
        }
        to.set(r, from);
    }

    void attend(Team& team, int thread, int64_t index) {
        int64_t n = s_.num_tokens, heads = m_.num_kv_heads, begin, end;
        Lines& coming = b_.threads[size_t(thread)].coming;
        float *qkv = b_.qkv.data(), *attended = b_.attended.data();
        while (team.take(n * heads, n < 64 ? 1 : 8 * heads, begin, end))
            for (int64_t i = begin; i < end; i++) place(index, i / heads, i % heads, qkv + i / heads * qkv_width_);
        team.barrier(&coming);
        bool last = index == m_.num_layers - 1;
        plan(index).run(team, thread, pages(index), qkv, qkv_width_, attended, &coming, last);
        if (!last) return;
        while (team.take(s_.num_outputs, 1, begin, end)) put_output(begin, attended + s_.outputs[begin] * attended_width_);
        team.barrier(&coming);
    }

    // After the last attention outputs lie by themselves.
    float* output_x() const { return b_.x.data() + s_.num_tokens * m_.hidden; }
    float* output_attended() const { return b_.attended.data() + (in_lots() ? 0 : s_.num_tokens * attended_width_); }
    void put_output(int64_t i, const float* attended) {
        std::memcpy(output_x() + i * m_.hidden, b_.x.data() + s_.outputs[i] * m_.hidden, size_t(m_.hidden) * 4);
        std::memcpy(output_attended() + i * attended_width_, attended, size_t(attended_width_) * 4);
    }

    AttentionPlan& plan(int64_t layer) { return b_.plans[size_t(m_.layers[layer].group)]; }

    Pages pages(int64_t layer) const {
        return {s_.keys[layer], s_.values[layer], s_.block_size, m_.num_kv_heads, m_.head_dim, s_.kv_format};
    }

    // Of a token's row, queries and key of a KV head normed and rotated, key and value written.
    void place(int64_t index, int64_t token, int64_t head, float* row) {
        const FolioLayer& layer = m_.layers[index];
        int64_t dim = m_.head_dim, half = dim / 2, shared = m_.num_heads / m_.num_kv_heads;
        float* key = row + (m_.num_heads + head) * dim;
        const float* angles = b_.angles.data() + token * dim;
        auto turn = [&](float* vector, const float* norm) {
            if (norm) rms_norm(vector, norm, dim, m_.eps, vector);
            rotate(vector, angles, angles + half, half);
        };
        for (int64_t i = head * shared; i < (head + 1) * shared; i++) turn(row + i * dim, layer.q_norm);
        plan(index).take_queries(token, head, row + head * shared * dim);
        turn(key, layer.k_norm);
        pages(index).write(s_.groups[layer.group].slots[token], head, key, key + m_.num_kv_heads * dim);
    }

    const FolioModel& m_;
    const FolioStep& s_;
    Buffers& b_;
    int64_t qkv_width_, attended_width_;
    bool keeps_queries_ = true;  // all plans: then nobody reads them again
};

}  // namespace

void forward(const FolioModel& model, const FolioStep& step) {
    one_order = step.deterministic != 0;
    Forward steps(model, step, buffers());
    run_team(int(step.threads), [&](Team& team, int thread) { steps.run(team, thread); });
}

}  // namespace folio
