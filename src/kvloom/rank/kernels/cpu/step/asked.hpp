// The tokens of a step whose logits or states are requested. Once the last layer's keys and values are stored, or its
// mixer has the sequences' states, the other tokens are not needed: the rest of the program runs as a step of the
// requested tokens alone. A row's bits do not depend on its batch, so results do not change.
#pragma once

#include "model/model.hpp"

namespace kvl {

class Asked {
  public:
    Asked(const kvl_model& model, const kvl_batch& all);

    // Whether the step has tokens that are not requested. With bidirectional attention all tokens count as requested.
    bool has_others() const { return has_others_; }
    bool is_nobody() const { return tokens_.empty(); }
    // The batch of the requested tokens, if has_others(); it points into this object.
    const kvl_batch& batch() const { return batch_; }
    // Moves the requested tokens' rows of the residual stream, their queries and gates, or a mixer's output, from their positions among all tokens to
    // their positions in `batch`. One thread calls it.
    void gather(Scratch& scratch) const;

  private:
    Asked(const Asked&) = delete;
    Asked& operator=(const Asked&) = delete;

    const kvl_model& model_;
    kvl_batch batch_;
    const int64_t num_all_;
    bool has_others_;
    std::vector<int32_t> tokens_, pos_, qstart_, rows_, states_;  // tokens_: ascending indices among all tokens
};

}  // namespace kvl
