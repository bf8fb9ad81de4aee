// The tokens of a step that somebody asks for. Behind the last layer's keys and values nothing of the others is needed: what is
// left of the program is a step of these tokens alone, whose rows have the bits that they have in any company.
#pragma once

#include "model.hpp"

namespace kvl {

class Asked {
  public:
    Asked(const kvl_model& model, const kvl_batch& all);

    // Whether there are others. Where tokens see those behind them, all count as asked for.
    bool has_others() const { return has_others_; }
    bool is_nobody() const { return tokens_.empty(); }
    // The step of these tokens, if there are others; points into this.
    const kvl_batch& batch() const { return batch_; }
    // Their rows of what attention reads and adds to, from where all tokens have them to where `batch` has them. By one thread.
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
