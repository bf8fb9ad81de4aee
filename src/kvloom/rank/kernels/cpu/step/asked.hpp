// The tokens of a step whose logits or states are requested. Behind the last layer's keys and values the others are not
// needed: the rest of the program runs as a step of the requested tokens alone. A row's bits do not depend on its
// batch.
#pragma once

#include "model/model.hpp"

namespace kvl {

class Asked {
  public:
    Asked(const kvl_model& model, const kvl_batch& all);

    // Whether there are other tokens. Where tokens see later ones, all count as requested.
    bool has_others() const { return has_others_; }
    bool is_nobody() const { return tokens_.empty(); }
    // The step of these tokens, if there are others; points into this.
    const kvl_batch& batch() const { return batch_; }
    // Moves the rows of the requested tokens, in the buffers that attention reads and adds to, from their places among
    // all tokens to their places in `batch`. Called by one thread.
    void gather(Scratch& scratch) const;

  private:
    Asked(const Asked&) = delete;
    Asked& operator=(const Asked&) = delete;

    const kvl_model& model_;
    kvl_batch batch_;
    const int64_t num_all_;
    bool has_others_;
    std::vector<int32_t> tokens_, pos_, qstart_, rows_, states_;  // tokens_: in order, as all tokens are counted
};

}  // namespace kvl
