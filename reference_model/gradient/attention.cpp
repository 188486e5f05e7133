// SPDX-License-Identifier: Apache-2.0
#include <reference_model/gradient/attention.hpp>

#include <algorithm>
#include <array>
#include <cmath>

#include <kvpolicy/core/error.hpp>
#include <reference_model/library_product.hpp>
#include <reference_model/parallel.hpp>

namespace kvpolicy::reference {
namespace {

constexpr std::size_t block_queries = 64;

struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;
  [[nodiscard]] std::size_t size() const { return end - begin; }
};

/// A block of queries, and the one or two runs of rows that at least one of them sees. A matrix of
/// scores has a row for each query and a column for each of these rows; the runs are side by side.
class Block {
 public:
  Block(const AttentionMask& mask, std::size_t first, std::size_t count)
      : mask_{mask}, first_{first}, count_{count} {
    const std::size_t end = first + count;
    const std::size_t sinks = std::min(mask.sinks, end);
    const std::size_t window = window_begin(first);
    if (mask.recent == 0) {
      runs_[0] = {.begin = 0, .end = sinks};
    } else if (window <= sinks) {
      runs_[0] = {.begin = 0, .end = end};
    } else {
      runs_ = {Range{.begin = 0, .end = sinks}, Range{.begin = window, .end = end}};
    }
  }

  [[nodiscard]] std::size_t first() const { return first_; }
  [[nodiscard]] std::size_t queries() const { return count_; }
  [[nodiscard]] std::size_t columns() const { return runs_[0].size() + runs_[1].size(); }

  /// Calls work(row of the text, rows, column) for each run.
  template <class Work>
  void for_each_run(Work work) const {
    std::size_t column = 0;
    for (const Range& run : runs_) {
      if (run.size() > 0) work(run.begin, run.size(), column);
      column += run.size();
    }
  }

  /// The columns that one query of the block sees: those of the sinks and of the window.
  [[nodiscard]] std::array<Range, 2> seen_by(std::size_t query) const {
    const std::size_t position = first_ + query;
    const Range sinks{.begin = 0, .end = std::min(mask_.sinks, position + 1)};
    if (mask_.recent == 0) return {sinks, Range{}};
    const std::size_t begin = std::max(window_begin(position), sinks.end);
    if (begin > position) return {sinks, Range{}};
    // If there is a gap, the columns of the window follow directly after those of the sinks.
    const bool second = begin >= runs_[0].end;
    const std::size_t shift = second ? runs_[1].begin - runs_[0].size() : 0;
    return {sinks, Range{.begin = begin - shift, .end = position + 1 - shift}};
  }

 private:
  [[nodiscard]] std::size_t window_begin(std::size_t position) const {
    return position + 1 - std::min(mask_.recent, position + 1);
  }

  AttentionMask mask_;
  std::size_t first_;
  std::size_t count_;
  std::array<Range, 2> runs_{};
};

MatrixView rows_of(TensorView<const float> x, std::size_t head, std::size_t first, std::size_t count) {
  return {.data = x.row(first, head), .rows = count, .columns = x.head_dim, .stride = x.token_stride};
}

MatrixView transposed(MatrixView view) {
  view.transposed = !view.transposed;
  return view;
}

void check(TensorView<const float> q, TensorView<const float> k, TensorView<const float> v,
           std::span<const AttentionMask> masks, TensorView<const float> out) {
  require<ShapeError>(q.heads > 0 && k.heads > 0 && q.heads % k.heads == 0, "masked_attention: ", q.heads,
                      " query heads and ", k.heads, " KV heads, the first must be a multiple of the second");
  require<ShapeError>(q.tokens == k.tokens && q.tokens == v.tokens && q.tokens == out.tokens &&
                          k.heads == v.heads && out.heads == q.heads && q.head_dim == k.head_dim &&
                          q.head_dim == v.head_dim && q.head_dim == out.head_dim,
                      "masked_attention: q [", q.tokens, ", ", q.heads, ", ", q.head_dim, "], k [", k.tokens,
                      ", ", k.heads, ", ", k.head_dim, "], v [", v.tokens, ", ", v.heads, ", ", v.head_dim,
                      "] and out [", out.tokens, ", ", out.heads, ", ", out.head_dim, "] do not fit");
  require<ShapeError>(masks.size() == k.heads, "masked_attention: ", masks.size(),
                      " masks, must be one for each of the ", k.heads, " KV heads");
  for (const AttentionMask& mask : masks) {
    require(mask.sinks > 0 || mask.recent > 0,
            "masked_attention: a mask without sinks and without recent rows shows a query nothing");
  }
}

/// Calls work(kv_head) for all heads, on several threads if the text is long enough to be worth it.
template <class Work>
void for_each_head(std::size_t heads, std::size_t tokens, const Work& work) {
  for_each_block(heads, 1, tokens >= 4 * block_queries, [&](std::size_t head, std::size_t) { work(head); });
}

float softmax_scale(std::size_t head_dim) { return 1.0F / std::sqrt(static_cast<float>(head_dim)); }

/// Computes scores [queries, columns] = scale * q kᵀ for a block, without the mask.
void score(TensorView<const float> q, TensorView<const float> k, const Block& block, std::size_t head,
           std::size_t kv_head, std::vector<float>& scores) {
  scores.resize(block.queries() * block.columns());
  const MatrixView queries = rows_of(q, head, block.first(), block.queries());
  block.for_each_run([&](std::size_t row, std::size_t rows, std::size_t column) {
    multiply(queries, transposed(rows_of(k, kv_head, row, rows)), softmax_scale(q.head_dim), 0.0F,
             scores.data() + column, block.columns());
  });
}

MatrixView part_of(const std::vector<float>& scores, const Block& block, std::size_t column,
                   std::size_t columns) {
  return {
      .data = scores.data() + column, .rows = block.queries(), .columns = columns, .stride = block.columns()};
}

/// Turns scores into probabilities; stores the log of each query's sum in `log_sums`.
void softmax(const Block& block, std::vector<float>& scores, float* log_sums) {
  for (std::size_t query = 0; query < block.queries(); ++query) {
    float* row = scores.data() + query * block.columns();
    const auto seen = block.seen_by(query);
    float highest = -std::numeric_limits<float>::infinity();
    for (const Range& range : seen) {
      for (std::size_t i = range.begin; i < range.end; ++i) highest = std::max(highest, row[i]);
    }
    float sum = 0.0F;
    std::size_t done = 0;
    for (const Range& range : seen) {
      if (range.size() == 0) continue;
      std::fill(row + done, row + range.begin, 0.0F);
      for (std::size_t i = range.begin; i < range.end; ++i) {
        row[i] = std::exp(row[i] - highest);
        sum += row[i];
      }
      done = range.end;
    }
    std::fill(row + done, row + block.columns(), 0.0F);
    const float inverse = 1.0F / sum;
    for (std::size_t i = 0; i < done; ++i) row[i] *= inverse;
    log_sums[query] = highest + std::log(sum);
  }
}

}  // namespace

void masked_attention(TensorView<const float> q, TensorView<const float> k, TensorView<const float> v,
                      std::span<const AttentionMask> masks, TensorView<float> out, AttentionRecord* record) {
  check(q, k, v, masks, out);
  const std::size_t group = q.heads / k.heads;
  if (record != nullptr) record->log_sums.assign(q.heads * q.tokens, 0.0F);
  for_each_head(k.heads, q.tokens, [&](std::size_t kv_head) {
    std::vector<float> scores;
    std::array<float, block_queries> log_sums{};
    for (std::size_t first = 0; first < q.tokens; first += block_queries) {
      const Block block{masks[kv_head], first, std::min(block_queries, q.tokens - first)};
      for (std::size_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        score(q, k, block, head, kv_head, scores);
        softmax(block, scores, log_sums.data());
        float keep = 0.0F;
        block.for_each_run([&](std::size_t row, std::size_t rows, std::size_t column) {
          multiply(part_of(scores, block, column, rows), rows_of(v, kv_head, row, rows), 1.0F, keep,
                   out.row(first, head), out.token_stride);
          keep = 1.0F;
        });
        if (record != nullptr) {
          std::copy_n(log_sums.data(), block.queries(), record->log_sums.data() + head * q.tokens + first);
        }
      }
    }
  });
}

namespace {

/// For each query: dscores = p (dp - <dout, out>) scale, written over dp; p follows from scores and
/// log sums.
void softmax_back(const Block& block, std::vector<float>& scores, std::vector<float>& changes,
                  const float* log_sums, const std::array<float, block_queries>& through, float scale) {
  for (std::size_t query = 0; query < block.queries(); ++query) {
    float* row = scores.data() + query * block.columns();
    float* change = changes.data() + query * block.columns();
    std::size_t done = 0;
    for (const Range& range : block.seen_by(query)) {
      if (range.size() == 0) continue;
      std::fill(row + done, row + range.begin, 0.0F);
      std::fill(change + done, change + range.begin, 0.0F);
      for (std::size_t i = range.begin; i < range.end; ++i) {
        row[i] = std::exp(row[i] - log_sums[query]);
        change[i] = row[i] * (change[i] - through[query]) * scale;
      }
      done = range.end;
    }
    std::fill(row + done, row + block.columns(), 0.0F);
    std::fill(change + done, change + block.columns(), 0.0F);
  }
}

}  // namespace

void masked_attention_back(TensorView<const float> q, TensorView<const float> k, TensorView<const float> v,
                           std::span<const AttentionMask> masks, TensorView<const float> out,
                           const AttentionRecord& record, TensorView<const float> dout, TensorView<float> dq,
                           TensorView<float> dk, TensorView<float> dv) {
  check(q, k, v, masks, out);
  check(dq, dk, dv, masks, dout);
  require<ShapeError>(dq.tokens == q.tokens && dq.heads == q.heads && dk.heads == k.heads &&
                          record.log_sums.size() == q.heads * q.tokens,
                      "masked_attention_back: the gradients or the record are of another text");
  const std::size_t group = q.heads / k.heads;
  const float scale = softmax_scale(q.head_dim);
  for_each_head(k.heads, q.tokens, [&](std::size_t kv_head) {
    std::vector<float> scores;
    std::vector<float> changes;
    std::array<float, block_queries> through{};
    for (std::size_t first = 0; first < q.tokens; first += block_queries) {
      const Block block{masks[kv_head], first, std::min(block_queries, q.tokens - first)};
      for (std::size_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        bool any = false;
        for (std::size_t query = 0; query < block.queries(); ++query) {
          float sum = 0.0F;
          const float* change = dout.row(first + query, head);
          const float* result = out.row(first + query, head);
          for (std::size_t i = 0; i < q.head_dim; ++i) {
            sum += change[i] * result[i];
            any = any || change[i] != 0.0F;
          }
          through[query] = sum;
        }
        if (!any) continue;
        score(q, k, block, head, kv_head, scores);
        changes.resize(scores.size());
        const MatrixView block_dout = rows_of(dout, head, first, block.queries());
        const MatrixView block_q = rows_of(q, head, first, block.queries());
        block.for_each_run([&](std::size_t row, std::size_t rows, std::size_t column) {
          multiply(block_dout, transposed(rows_of(v, kv_head, row, rows)), 1.0F, 0.0F,
                   changes.data() + column, block.columns());
        });
        softmax_back(block, scores, changes, record.log_sums.data() + head * q.tokens + first, through,
                     scale);
        block.for_each_run([&](std::size_t row, std::size_t rows, std::size_t column) {
          const MatrixView weights = part_of(scores, block, column, rows);
          const MatrixView dscores = part_of(changes, block, column, rows);
          multiply(transposed(weights), block_dout, 1.0F, 1.0F, dv.row(row, kv_head), dv.token_stride);
          multiply(dscores, rows_of(k, kv_head, row, rows), 1.0F, 1.0F, dq.row(first, head), dq.token_stride);
          multiply(transposed(dscores), block_q, 1.0F, 1.0F, dk.row(row, kv_head), dk.token_stride);
        });
      }
    }
  });
}

}  // namespace kvpolicy::reference
