// SPDX-License-Identifier: Apache-2.0
//
// Random texts through the kernels that write rows, with rollbacks and commits: after every call
// each exact row, code, scale, zero and summary is bit for bit what plain loops over the text make
// of it (support/written_head.hpp).
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <kvpolicy/cuda/kernels/append.cuh>

#include "cuda/support/codes.hpp"
#include "cuda/support/device_head.hpp"
#include "cuda/support/launch.hpp"
#include "cuda/support/written_head.hpp"
#include "support/tensors.hpp"

using kvpolicy::Encoding;
using kvpolicy::gpu::AppendParams;
using kvpolicy::gpu::HeadView;
using kvpolicy::gpu::LayerState;
using test::all_codes;
using test::below;
using test::DeviceHead;
using test::launch;
using test::one_of;
using test::Random;
using test::WrittenHead;

namespace {

struct Limits {
  int max_rollback = 0;
  int most_tentative = 0;
  int capacity = 1200;  // rows
};

HeadView random_view(Random& random, int head_dim, int page_rows, const Limits& limits) {
  const auto whole_pages = [&](int rows) { return (rows + page_rows - 1) / page_rows * page_rows; };
  HeadView view;
  const bool packed = (head_dim == 64 || head_dim == 128) && below(random, 3) > 0;
  const bool window = below(random, 3) == 0;
  int exact = limits.most_tentative;
  if (window) {
    view.sinks = one_of(random, std::vector{0, 1, 4, 63, 64, 65, 130});
    view.recent = one_of(random, std::vector{1, 20, 64, 100, 200});
    if (!packed) exact += view.recent;
  } else if (below(random, 2) == 0) {
    view.chunk_rows = one_of(random, std::vector{8, 16, 64, 100});
    view.min_max = below(random, 2) == 0;
    view.budget_chunks = 4;
    exact += view.chunk_rows;
  }
  if (packed) {
    all_codes[below(random, all_codes.size())].describe(view);
    view.key_per_channel = !window && below(random, 2) == 0;
    view.key_group =
        view.key_per_channel ? one_of(random, std::vector{16, 32, 64}) : head_dim >> below(random, 3);
    view.value_group = one_of(random, std::vector{8, 32, head_dim});
    view.key_hadamard = below(random, 2) == 0;
    view.value_hadamard = below(random, 2) == 0;
    view.residual = one_of(random, std::vector{0, 1, 64, 100});
    exact += view.residual + 64;
    if (window) view.packed_ring = whole_pages(view.recent + limits.most_tentative + 64);
  }
  if (window || packed) view.exact_ring = whole_pages(exact);
  return view;
}

// A batch of sequences of one layer under random calls.
template <class E, int HeadDim>
class Layer {
 public:
  explicit Layer(unsigned seed) : random_{seed} {
    test::set_order(seed);
    page_rows_ = below(random_, 2) == 0 ? 64 : 128;
    sequences_ = 1 + static_cast<int>(below(random_, 2));
    kv_heads_ = 1 + static_cast<int>(below(random_, 3));
    limits_.max_rollback = one_of(random_, std::vector{0, 0, 1, 7, 100});
    limits_.most_tentative = limits_.max_rollback + 64;
    for (int s = 0; s < sequences_; ++s) {
      const int evicted = below(random_, 3) == 0 ? 37 : 0;
      states_.push_back({.tokens = evicted, .committed = evicted});
      for (int h = 0; h < kv_heads_; ++h) begin_head(s, evicted);
    }
    for (const auto& head : heads_) views_.push_back(head->view());
    tickets_.assign(static_cast<std::size_t>(sequences_), 0);
  }

  void run(int calls) {
    for (int call = 0; call < calls && !full(); ++call) {
      const int s = static_cast<int>(below(random_, static_cast<std::size_t>(sequences_) + 1));
      const bool all = s == sequences_;
      const int first = all ? 0 : s, count = all ? sequences_ : 1;
      const std::size_t kind = below(random_, 8);
      if (kind == 0) {
        append(first, count, 0, 0, 0);  // commit
      } else if (kind == 1) {
        truncate(first, count);
      } else if (kind == 2) {
        int rows = 64;
        for (int i = first; i < first + count; ++i) {
          rows = std::min(rows, limits_.most_tentative - state(i).tokens + state(i).committed);
        }
        append(first, count, std::min(rows, one_of(random_, sizes)), 0, limits_.max_rollback);
      } else {
        const int rows = one_of(random_, sizes);
        append(first, count, rows, rows, limits_.max_rollback);
      }
      for (int h = 0; h < sequences_ * kv_heads_; ++h) head(h).check(state(h / kv_heads_));
      for (const std::uint32_t ticket : tickets_) CHECK(ticket == 0);
      CHECK(*out_of_range_ == 0);
    }
  }

 private:
  inline static const std::vector<int> sizes{0, 1, 1, 1, 2, 3, 7, 16, 31, 63, 64, 65, 100, 130, 257};

  WrittenHead<E>& head(int i) { return *heads_[static_cast<std::size_t>(i)]; }
  LayerState& state(int i) { return states_[static_cast<std::size_t>(i)]; }

  // Heads with other numbers of evicted rows than their neighbours hold rows at once.
  void begin_head(int sequence, int evicted) {
    HeadView view = random_view(random_, HeadDim, page_rows_, limits_);
    view.evicted = below(random_, 2) == 0 ? evicted : 0;
    auto next = std::make_unique<WrittenHead<E>>(view, HeadDim, page_rows_, limits_.capacity);
    const int rows = evicted - view.evicted;
    std::vector<float> numbers[2];
    for (int side = 0; side < 2; ++side) {
      for (int i = 0; i < rows * HeadDim; ++i) {
        const E x{test::normal(random_)};
        next->text[side].push_back(x.bits);
        numbers[side].push_back(static_cast<float>(x));
      }
    }
    next->memory.store(numbers[0], numbers[1], state(sequence));
    if (view.chunk_rows > 0) next->first_chunk = rows / view.chunk_rows;
    heads_.push_back(std::move(next));
  }

  [[nodiscard]] bool full() const {
    return std::ranges::any_of(
        states_, [&](const LayerState& s) { return s.tokens + sizes.back() > limits_.capacity; });
  }

  void append(int first, int count, int rows, int commit_rows, int max_rollback) {
    // Strided, with heads apart; exactly as long as it must be.
    const int head_stride = HeadDim + 8, token_stride = kv_heads_ * head_stride + 16;
    const int sequence_stride = rows * token_stride + 8;
    std::vector<std::uint16_t> numbers[2];
    for (int side = 0; side < 2; ++side) {
      numbers[side].assign(static_cast<std::size_t>(count * sequence_stride), 0x7fc0);
      for (int s = 0; s < count; ++s) {
        for (int t = 0; t < rows; ++t) {
          for (int h = 0; h < kv_heads_; ++h) {
            auto& text = head((first + s) * kv_heads_ + h).text[side];
            for (int c = 0; c < HeadDim; ++c) {
              const E x{test::normal(random_)};
              numbers[side][static_cast<std::size_t>(s * sequence_stride + t * token_stride +
                                                     h * head_stride + c)] = x.bits;
              text.push_back(x.bits);
            }
          }
        }
      }
    }
    const auto tensor = [&](int side) {
      return kvpolicy::gpu::Tensor{reinterpret_cast<std::byte*>(numbers[side].data()), sequence_stride,
                                   token_stride, head_stride};
    };
    const AppendParams params{.heads = views_.data() + first * kv_heads_,
                              .states = states_.data() + first,
                              .sequences = count,
                              .kv_heads = kv_heads_,
                              .page_rows = page_rows_,
                              .rows = rows,
                              .commit_rows = commit_rows,
                              .max_rollback = max_rollback,
                              .k = tensor(0),
                              .v = tensor(1),
                              .tickets = tickets_.data() + first,
                              .out_of_range = out_of_range_.get()};
    const std::vector<LayerState> before = states_;
    constexpr std::size_t shared = kvpolicy::gpu::append_shared_bytes<HeadDim>();
    if (rows <= 64 && below(random_, 3) > 0) {
      launch(kvpolicy::gpu::append_kernel<E, HeadDim>, kv_heads_, count, kvpolicy::gpu::write_threads, shared,
             params);
    } else {
      launch(kvpolicy::gpu::commit_kernel<E, HeadDim>, 1 + static_cast<int>(below(random_, 3)),
             count * kv_heads_, kvpolicy::gpu::write_threads, shared, params);
      launch(kvpolicy::gpu::write_kernel<E, HeadDim>, 1 + static_cast<int>(below(random_, 6)),
             count * kv_heads_, kvpolicy::gpu::write_threads, 0, params);
    }
    for (int s = 0; s < sequences_; ++s) {
      LayerState expected = before[static_cast<std::size_t>(s)];
      if (s >= first && s < first + count) {
        expected.committed = std::max(expected.committed, expected.tokens + commit_rows - max_rollback);
        expected.tokens += rows;
      }
      CHECK(state(s).tokens == expected.tokens);
      CHECK(state(s).committed == expected.committed);
    }
  }

  // To one length for all, as the kernel has it; only where that is allowed.
  void truncate(int first, int count) {
    int from = 0, to = limits_.capacity;
    for (int s = first; s < first + count; ++s) {
      from = std::max(from, state(s).committed);
      to = std::min(to, state(s).tokens);
    }
    if (from > to) return;
    const int tokens = from + static_cast<int>(below(random_, static_cast<std::size_t>(to - from) + 1));
    const kvpolicy::gpu::SetStateParams params{.heads = views_.data() + first * kv_heads_,
                                               .states = states_.data() + first,
                                               .count = count,
                                               .kv_heads = kv_heads_,
                                               .state = {.tokens = tokens, .committed = -1},
                                               .choices_until = tokens};
    const std::vector<LayerState> before = states_;
    launch(kvpolicy::gpu::set_state_kernel<>, 1, 1, kvpolicy::gpu::set_state_threads, 0, params);
    for (int s = first; s < first + count; ++s) {
      CHECK(state(s).tokens == tokens);
      CHECK(state(s).committed == before[static_cast<std::size_t>(s)].committed);
      for (int h = s * kv_heads_; h < (s + 1) * kv_heads_; ++h) {
        for (auto& text : head(h).text) {
          text.resize(static_cast<std::size_t>((tokens - head(h).view().evicted) * HeadDim));
        }
      }
    }
  }

  Random random_;
  int page_rows_ = 64;
  int sequences_ = 1;
  int kv_heads_ = 1;
  Limits limits_;
  std::vector<LayerState> states_;
  std::vector<std::unique_ptr<WrittenHead<E>>> heads_;
  std::vector<HeadView> views_;
  std::vector<std::uint32_t> tickets_;
  std::unique_ptr<int> out_of_range_ = std::make_unique<int>(0);
};

template <class E, int HeadDim>
void run_random_calls(unsigned first_seed, unsigned seeds) {
  for (unsigned seed = first_seed; seed < first_seed + seeds; ++seed) {
    CAPTURE(seed);
    CAPTURE(HeadDim);
    Layer<E, HeadDim>{seed}.run(20);
  }
}

}  // namespace

TEST_CASE("rows, codes and summaries are those of plain loops, whatever the calls") {
  run_random_calls<kvpolicy::bfloat16, 128>(100, 14);
  run_random_calls<kvpolicy::float16, 128>(200, 10);
  run_random_calls<kvpolicy::bfloat16, 64>(300, 14);
  run_random_calls<kvpolicy::float16, 64>(400, 14);
  run_random_calls<kvpolicy::bfloat16, 80>(500, 6);
  run_random_calls<kvpolicy::float16, 96>(600, 6);
  run_random_calls<kvpolicy::float16, 256>(700, 4);
  run_random_calls<kvpolicy::bfloat16, 256>(800, 4);
}

TEST_CASE("a rollback takes choices with it") {
  Random random{11};
  for (int round = 0; round < 40; ++round) {
    constexpr int count = 3, kv_heads = 47;  // more than one block of threads
    std::vector<std::unique_ptr<DeviceHead<kvpolicy::float16>>> heads;
    std::vector<HeadView> views;
    std::vector<int> expected_valid, expected_latest;
    const int tokens = static_cast<int>(below(random, 40));
    for (int i = 0; i < count * kv_heads; ++i) {
      HeadView view;
      view.chunk_rows = i % 4 == 0 ? 0 : 16;
      view.budget_chunks = 1;
      const int slots = 1 + static_cast<int>(below(random, 4));
      heads.push_back(std::make_unique<DeviceHead<kvpolicy::float16>>(view, 64, 64, 64, slots));
      views.push_back(heads.back()->view());
      if (view.chunk_rows == 0) continue;
      auto& choices = heads.back()->selections();
      choices.valid = static_cast<int>(below(random, static_cast<std::size_t>(slots) + 1));
      choices.latest = static_cast<int>(below(random, static_cast<std::size_t>(slots)));
      int length = 50;
      int valid = choices.valid, latest = choices.latest;
      for (int back = 0; back < choices.valid; ++back) {
        const int slot = (choices.latest + slots - back) % slots;
        choices.tokens[slot] = length -= 1 + static_cast<int>(below(random, 20));
        if (length > tokens) {
          --valid;
          latest = (slot + slots - 1) % slots;
        }
      }
      expected_valid.push_back(valid);
      expected_latest.push_back(latest);
    }
    std::vector<LayerState> states(count, LayerState{.tokens = 60, .committed = 3});
    const kvpolicy::gpu::SetStateParams params{.heads = views.data(),
                                               .states = states.data(),
                                               .count = count,
                                               .kv_heads = kv_heads,
                                               .state = {.tokens = tokens + 5, .committed = 2},
                                               .choices_until = tokens};
    launch(kvpolicy::gpu::set_state_kernel<>,
           kvpolicy::gpu::quotient_up(count * kv_heads, kvpolicy::gpu::set_state_threads), 1,
           kvpolicy::gpu::set_state_threads, 0, params);
    for (const LayerState& state : states) {
      CHECK(state.tokens == tokens + 5);
      CHECK(state.committed == 2);
    }
    std::size_t at = 0;
    for (const auto& head : heads) {
      if (head->view().chunk_rows == 0) continue;
      CHECK(head->selections().valid == expected_valid[at]);
      CHECK(head->selections().latest == expected_latest[at]);
      ++at;
    }
  }
}
