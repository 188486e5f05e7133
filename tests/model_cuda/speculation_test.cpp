// SPDX-License-Identifier: Apache-2.0
//
// Speculative decoding with target and draft on a device. The code is the same as on the host, over device
// caches bound to their stream, and decodes greedily the text of plain decoding.
#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/kv_cache.hpp>
#include <kvpolicy/cuda/on_stream.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/triforce.hpp>
#include <reference_model/cuda/graph.hpp>
#include <reference_model/cuda/language_model.hpp>
#include <reference_model/cuda/llama.hpp>
#include <reference_model/run.hpp>

#include "model/golden.hpp"
#include "model_cuda/models.hpp"

namespace kvpolicy::reference::speculation_test {
namespace {

using Plan = HeadPlan<bfloat16>;
using Retrieval = ChunkRetrievalCache<DenseStorage<bfloat16>>;
using Window = SinkRecentCache<DenseStorage<bfloat16>>;
using Cache = gpu::KvCache<bfloat16>;
using OnStream = gpu::OnStream<Cache>;

gpu::CacheOptions options() {
  gpu::CacheOptions options;
  options.max_rollback = 24;
  options.max_append = 24;
  return options;
}

struct Rig {
  Llama model = rounded_to_bfloat16(Llama::load(golden_folder("gqa7_d64")));
  reference::Stream stream;
  CudaLlama target{model, {}, stream};
  CudaLlama small{model, {}, stream};  // agrees with the target where its window has enough of the text
  CudaLlamaReader target_reader{target};
  CudaLlamaReader small_reader{small};
  Plan plan{model.config().shape(), Retrieval::Config{.chunk = 4, .budget = 16}};
  Plan window{model.config().shape(), Window::Config{.sinks = 2, .recent = 20}};
  Cache cache{plan, options(), stream};
  Cache small_cache{window, options(), stream};
  OnStream on_stream{cache, stream};
  OnStream small_on_stream{small_cache, stream};
  std::vector<int> prompt = golden_tokens("gqa7_d64", 60);
};

SpeculationOptions greedy(std::size_t length) {
  SpeculationOptions options;
  options.length = length;
  options.adapt = false;
  options.refresh_selection.every = 9;
  return options;
}

constexpr std::size_t new_tokens = 24;

std::vector<int> plain_text() {
  Rig rig;
  SpeculativeDecoder decoder{rig.target_reader, rig.on_stream, NoDraft{}, greedy(0)};
  decoder.read_prompt(rig.prompt);
  CHECK(decoder.generate(new_tokens) == Ending::length);
  return {decoder.text().begin(), decoder.text().end()};
}

template <class Decoder>
void check_text(Decoder decoder, const Rig& rig, const std::vector<int>& want) {
  decoder.read_prompt(rig.prompt);
  CHECK(decoder.generate(new_tokens) == Ending::length);
  CHECK(std::vector<int>(decoder.text().begin(), decoder.text().end()) == want);
  CHECK(rig.cache.tokens() == want.size() - 1);
  // Otherwise no draft token was used.
  CHECK(decoder.statistics().accepted > 0);
  CHECK(decoder.statistics().positions > decoder.statistics().accepted - 1);
}

TEST_CASE("draft tokens on a device change no token of the text") {
  const std::vector<int> want = plain_text();
  SUBCASE("by a model with a window") {
    Rig rig;
    check_text(SpeculativeDecoder{rig.target_reader, rig.on_stream,
                                  ModelDraft{rig.small_reader, rig.small_on_stream}, greedy(4)},
               rig, want);
  }
  SUBCASE("by the target over selected rows") {
    Rig rig;
    check_text(SpeculativeDecoder{rig.target_reader, rig.on_stream,
                                  SelectedDraft{rig.target_reader, rig.on_stream, NoDraft{}}, greedy(5)},
               rig, want);
  }
  SUBCASE("by both") {
    Rig rig;
    check_text(triforce(rig.target_reader, rig.on_stream, rig.small_reader, rig.small_on_stream, greedy(6)),
               rig, want);
  }
  SUBCASE("in a tree") {
    Rig rig;
    const std::vector<double> acceptance{0.6, 0.2, 0.1};
    check_text(SpeculativeDecoder{rig.target_reader, rig.on_stream,
                                  TreeDraft{rig.small_reader, rig.small_on_stream, best_tree(acceptance, 9)},
                                  greedy(9)},
               rig, want);
  }
}

TEST_CASE("quantised rows on a device are committed at the same positions with drafts and without") {
  using Packed = QuantizedResidualCache<bfloat16>;
  Rig rig;
  const HeadPlan plan{rig.model.config().shape(), Packed::Config{.storage = {.bits = 4, .residual = 16}}};
  const auto decoded = [&](auto draft, std::size_t length) {
    Cache cache{plan, options(), rig.stream};
    CHECK(cache.commit_changes_rows());
    gpu::OnStream on_stream{cache, rig.stream};
    SpeculativeDecoder decoder{rig.target_reader, on_stream, std::move(draft), greedy(length)};
    CHECK(decoder.commit_every() == options().max_rollback);
    decoder.read_prompt(rig.prompt);
    CHECK(decoder.generate(new_tokens) == Ending::length);
    CHECK((length == 0 || decoder.statistics().accepted > 0));
    return std::vector<int>{decoder.text().begin(), decoder.text().end()};
  };
  CHECK(decoded(ModelDraft{rig.small_reader, rig.small_on_stream}, 4) == decoded(NoDraft{}, 0));
  CHECK_FALSE(rig.on_stream.commit_changes_rows());
  CHECK(SpeculativeDecoder{rig.target_reader, rig.on_stream, NoDraft{}, greedy(0)}.commit_every() == 0);
}

TEST_CASE("tokens of a tree have the positions of their nodes") {
  Rig rig;
  static_cast<void>(rig.target_reader.read(rig.on_stream, {.tokens = rig.prompt}));
  const std::size_t text = rig.prompt.size();
  TokenTree tree;
  for (const std::size_t parent :
       {TokenTree::text, TokenTree::text, std::size_t{0}, std::size_t{1}, std::size_t{2}}) {
    tree.add(parent);
  }
  const std::vector<int> tokens{1, 2, 3, 4, 5};
  const std::size_t vocabulary = rig.target_reader.vocabulary();
  const auto together = rig.target_reader.read(
      rig.on_stream, {.tokens = tokens, .logits = LogitsOf::all, .attend = {.tree = &tree}});
  rig.on_stream.truncate(text);
  for (const std::vector<std::size_t>& path : {std::vector<std::size_t>{0, 2, 4}, {1, 3}}) {
    for (const std::size_t node : path) {
      const auto alone =
          rig.target_reader.read(rig.on_stream, {.tokens = std::span{tokens}.subspan(node, 1)});
      const std::span row{together.data() + node * vocabulary, vocabulary};
      float error = 0.0F;
      for (std::size_t i = 0; i < vocabulary; ++i) {
        const float difference = std::abs(alone[i] - row[i]);
        error = difference <= error ? error : difference;  // keeps a NaN
      }
      CHECK(error <= 0.02F * spread(alone));
    }
    rig.on_stream.truncate(text);
  }
}

}  // namespace
}  // namespace kvpolicy::reference::speculation_test
