#include "step/asked.hpp"

#include <cstring>

namespace kvl {

Asked::Asked(const kvl_model& model, const kvl_batch& all)
    : model_(model), batch_(all), num_all_(all.num_tokens),
      has_others_(!model.shape.sees_ahead && model.last_mixer >= 0 && all.num_rows + all.num_states < all.num_tokens) {
    if (!has_others_) return;
    std::vector<int32_t> index(size_t(num_all_), -1);  // index of a token among the requested ones, -1 = not requested
    for (int i = 0; i < all.num_rows; i++) index[size_t(all.rows[i])] = 0;
    for (int i = 0; i < all.num_states; i++) index[size_t(all.state_rows[i])] = 0;
    for (int s = 0; s < all.num_seqs; s++) {
        qstart_.push_back(int32_t(tokens_.size()));
        for (int32_t token = all.qstart[s]; token < all.qstart[s + 1]; token++) {
            if (index[size_t(token)] < 0) continue;
            index[size_t(token)] = int32_t(tokens_.size());
            tokens_.push_back(token);
            pos_.push_back(all.pos[token]);
        }
    }
    qstart_.push_back(int32_t(tokens_.size()));
    for (int i = 0; i < all.num_rows; i++) rows_.push_back(index[size_t(all.rows[i])]);
    for (int i = 0; i < all.num_states; i++) states_.push_back(index[size_t(all.state_rows[i])]);
    batch_.num_tokens = int32_t(tokens_.size());
    batch_.ids = batch_.types = nullptr;  // only earlier instructions read them
    batch_.pos = pos_.data();
    batch_.qstart = qstart_.data();
    batch_.rows = rows_.data();
    batch_.state_rows = states_.data();
}

// Works in place: every row moves towards the beginning, and rows move in ascending order, so none is overwritten
// before it has moved.
void Asked::gather(Scratch& scratch) const {
    const int64_t count = int64_t(tokens_.size());
    for (const Rows& rows : {scratch.residual, scratch.gates, scratch.mixed, scratch.inputs})
        for (int64_t i = 0; rows.stride > 0 && i < count; i++)
            std::memmove(rows.row(i), rows.row(tokens_[size_t(i)]), size_t(rows.stride) * sizeof(float));
    const kvl_instruction& next = model_.program[size_t(model_.last_mixer)];
    if (next.kind != KVL_ATTENTION) return;
    const kvl_attention& own = model_.attentions[size_t(next.layer)];
    const int64_t each = own.num_heads / own.num_kv_heads, dim = own.key_dim;
    for (int64_t head = 0; head < own.num_kv_heads; head++)
        for (int64_t i = 0; i < count; i++) {
            const int64_t to = (head * count + i) * each, from = (head * num_all_ + tokens_[size_t(i)]) * each;
            std::memmove(scratch.queries + to * dim, scratch.queries + from * dim, size_t(each * dim) * sizeof(uint16_t));
            std::memmove(scratch.query_scale + to, scratch.query_scale + from, size_t(each) * sizeof(float));
        }
}

}  // namespace kvl
