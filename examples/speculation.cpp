// SPDX-License-Identifier: Apache-2.0
//
// Speculative decoding with a user's own model: what an engine has to write, and TriForce's three
// levels over it. Needs a C++20 compiler and nothing else.
//
// The model is small but can continue a text: an induction head. Layers 0 and 1 look one and two
// tokens back. Layer 2 looks for earlier positions that follow the same two tokens as the current
// one, and predicts the token that stood there. A token is a word.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <kvpolicy/triforce.hpp>

namespace {

using kvpolicy::TensorView;

constexpr std::size_t channels = 64;

// A pseudo-random direction for each number; the directions of two numbers are nearly orthogonal.
void write_direction(std::uint64_t number, float* out) {
  std::uint64_t bits = number + 1;
  for (std::size_t i = 0; i < channels; ++i) {
    bits ^= bits << 13, bits ^= bits >> 7, bits ^= bits << 17;
    bits *= 0x9E3779B97F4A7C15U;
    out[i] = (bits >> 63U) != 0 ? 1.0F : -1.0F;
  }
}
constexpr std::uint64_t first_position = 1'000'000;  // lower numbers are words, higher ones positions

// One direction for two words in their order.
std::vector<float> joined(const std::vector<float>& later, const std::vector<float>& earlier) {
  std::vector<float> sum(later);
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += earlier[i - i % channels + (i + 1) % channels];
  return sum;
}

// The members that kvpolicy requires of a model: `vocabulary` and `read`.
class InductionModel {
 public:
  static constexpr kvpolicy::ModelShape shape{.layers = 3, .q_heads = 1, .kv_heads = 1, .head_dim = channels};

  // With a lower `sharpness` the model confuses more words.
  InductionModel(std::size_t words, float sharpness) : words_{words}, sharpness_{sharpness} {}

  std::size_t vocabulary() const { return words_; }

  template <class Cache>
  std::vector<float> read(Cache& cache, const kvpolicy::ModelCall& call) {
    const std::size_t tokens = call.tokens.size();
    const std::vector<std::size_t> positions = call.positions(cache.tokens());
    std::vector<float> words(tokens * channels), here(words), one_back(words), two_back(words);
    for (std::size_t i = 0; i < tokens; ++i) {
      write_direction(static_cast<std::uint64_t>(call.tokens[i]), &words[i * channels]);
      write_direction(first_position + positions[i], &here[i * channels]);
      write_direction(first_position + positions[i] - 1, &one_back[i * channels]);
      write_direction(first_position + positions[i] - 2, &two_back[i * channels]);
    }
    const auto last = attend(cache, 0, one_back, here, words, call.attend);
    const auto last_but_one = attend(cache, 1, two_back, here, words, call.attend);
    const auto next = attend(cache, 2, joined(words, last), joined(last, last_but_one), words, call.attend);

    std::vector<float> logits;
    const std::size_t first = call.logits == kvpolicy::LogitsOf::all    ? 0
                              : call.logits == kvpolicy::LogitsOf::last ? tokens - 1
                                                                        : tokens;
    std::vector<float> word(channels);
    for (std::size_t i = first; i < tokens; ++i) {
      for (std::size_t w = 0; w < words_; ++w) {
        write_direction(w, word.data());
        float sum = 0.0F;
        for (std::size_t c = 0; c < channels; ++c) sum += word[c] * next[i * channels + c];
        logits.push_back(sum * 8.0F / channels);
      }
    }
    return logits;
  }

 private:
  // An engine with a kvpolicy cache does the same: it appends the call's rows, then attends to all
  // rows.
  template <class Cache>
  std::vector<float> attend(Cache& cache, std::size_t layer, std::vector<float> q,
                            const std::vector<float>& k, const std::vector<float>& v,
                            const kvpolicy::AttendOptions& options) {
    const std::size_t tokens = q.size() / channels;
    std::vector<float> out(q.size());
    for (float& x : q) x *= sharpness_;
    const TensorView queries{static_cast<const float*>(q.data()), tokens, 1, channels};
    const TensorView keys{k.data(), tokens, 1, channels};
    const TensorView values{v.data(), tokens, 1, channels};
    const TensorView result{out.data(), tokens, 1, channels};
    if (tokens > cache.options().max_append) {  // a prompt
      cache.step(layer, queries, keys, values, result, options);
    } else {
      cache.append(layer, keys, values, options);
      cache.attend(layer, queries, result, options);
    }
    return out;
  }

  std::size_t words_;
  float sharpness_;
};

constexpr std::string_view rhyme =
    "this is the farmer sowing his corn that kept the cock that crowed in the morn that waked the "
    "priest all shaven and shorn that married the man all tattered and torn that kissed the maiden "
    "all forlorn that milked the cow with the crumpled horn that tossed the dog that worried the "
    "cat that killed the rat that ate the malt that lay in the house that jack built";

}  // namespace

int main() {
  // Words as tokens; the text is the rhyme six times over.
  std::vector<std::string> words;
  std::vector<int> prompt;
  for (int round = 0; round < 6; ++round) {
    std::istringstream in{std::string{rhyme}};
    for (std::string word; in >> word;) {
      const auto known = std::ranges::find(words, word);
      prompt.push_back(static_cast<int>(known - words.begin()));
      if (known == words.end()) words.push_back(word);
    }
  }
  InductionModel model{words.size(), 1.0F};
  InductionModel small_model{words.size(), 0.6F};
  const kvpolicy::ModelShape shape = InductionModel::shape;

  const auto show = [&](const kvpolicy::NewToken& token) {
    const char* marks[] = {"", "'", "\""};  // proposed by the target, by the middle level, by the
                                            // draft
    std::printf("%s%s ", words[static_cast<std::size_t>(token.token)].c_str(), marks[token.level]);
    return true;
  };

  // Always six draft tokens; without `adapt = false` the decoder chooses how many pay off.
  const kvpolicy::SpeculationOptions fixed{.length = 6, .adapt = false};

  // The target keeps every row and its middle level reads 64 of them; the draft keeps 4 + 76.
  const kvpolicy::CacheOptions room{.max_rollback = 17, .max_append = 17};
  kvpolicy::KvCache<float> cache{kvpolicy::triforce_plan(shape, {.chunk = 8, .budget = 64}), room};
  kvpolicy::KvCache<float> draft_cache{kvpolicy::triforce_draft_plan(shape, {.sinks = 4, .recent = 76}),
                                       room};

  auto decoder = kvpolicy::triforce(model, cache, small_model, draft_cache, fixed);
  decoder.read_prompt(prompt);
  decoder.generate(60, [&](const kvpolicy::NewToken& token) { return show(token); });

  const auto& did = decoder.statistics();
  std::printf("\n\n%zu tokens in %zu passes over all rows, %.0f %% of guesses accepted\n", did.tokens,
              did.verifications, 100.0 * did.acceptance());

  // Decoding token by token must give the same text.
  kvpolicy::KvCache<float> plain_cache{cache.plan(), room};
  kvpolicy::SpeculativeDecoder plain{model, plain_cache, kvpolicy::NoDraft{}, {.length = 0, .adapt = false}};
  plain.read_prompt(prompt);
  plain.generate(60);
  const bool same = std::ranges::equal(plain.text(), decoder.text());
  std::printf("token by token: %s\n", same ? "the same text" : "ANOTHER TEXT");
  return same ? 0 : 1;
}
