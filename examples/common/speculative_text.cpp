// SPDX-License-Identifier: Apache-2.0
#include "speculative_text.hpp"

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/speculation/acceptance_vector.hpp>
#include <kvpolicy/triforce.hpp>
#include <reference_model/language_model.hpp>

#include "any_draft.hpp"
#include "bytes_read.hpp"

namespace kvpolicy::tools {
namespace {

using Cache = KvCache<bfloat16, cpu::Engine<>>;
using Reader = reference::LlamaReader;
using Selected = SelectedDraft<Reader, Cache, AnyDraft>;
using Decoder = SpeculativeDecoder<Reader, Cache, AnyDraft>;

constexpr std::array<NamedStructure, 8> all_structures{{
    {"triforce", Structure::triforce, "a small model guesses, the target over selected rows verifies"},
    {"self", Structure::self, "the target over selected rows guesses"},
    {"halves", Structure::halves, "the target over the upper 4 of its rows' 8 bits guesses"},
    {"draft", Structure::draft, "a small model guesses, over sinks and latest rows"},
    {"streaming", Structure::streaming, "the target itself guesses, over sinks and latest rows"},
    {"ngram", Structure::ngram, "the text guesses: what followed these tokens before"},
    {"tree", Structure::tree, "a small model guesses several continuations at once"},
    {"plain", Structure::plain, "no draft: token by token"},
}};

template <class Summary>
HeadPlan<bfloat16> plan_with(const ModelShape& shape, const SpeculationSetup& setup) {
  if (setup.bits == 0) {
    using Policy = ChunkRetrievalCache<DenseStorage<bfloat16>, Summary>;
    return HeadPlan<bfloat16>{shape, typename Policy::Config{.chunk = setup.chunk, .budget = setup.budget}};
  }
  using Policy = ChunkRetrievalCache<PerTokenStorage<bfloat16>, Summary>;
  const std::size_t group = shape.head_dim % 32 == 0 ? 32 : 16;
  const ResidualConfig storage{.bits = setup.bits, .key_group = group, .value_group = group, .residual = 128};
  return HeadPlan<bfloat16>{
      shape, typename Policy::Config{.chunk = setup.chunk, .budget = setup.budget, .storage = storage}};
}

HeadPlan<bfloat16> limited(HeadPlan<bfloat16> plan, const reference::Llama& model) {
  reference::limit_windows(plan, model.config());
  return plan;
}

HeadPlan<bfloat16> plan_of_target(const reference::Llama& model, const SpeculationSetup& setup) {
  return limited(target_plan(model.config().shape(), setup), model);
}

bool drafts_itself(const SpeculationSetup& setup) { return setup.structure == Structure::streaming; }

HeadPlan<bfloat16> plan_of_draft(const reference::Llama& model, const SpeculationSetup& setup) {
  if (drafts_itself(setup) && setup.draft_plan) return limited(*setup.draft_plan, model);
  return limited(
      triforce_draft_plan<bfloat16>(model.config().shape(), {.sinks = setup.sinks, .recent = setup.recent}),
      model);
}

bool has_halves(const SpeculationSetup& setup) {
  return setup.halves || setup.structure == Structure::halves;
}
// What goes on from this text by another structure keeps its rows.
SpeculationSetup with_halves(SpeculationSetup setup) {
  setup.halves = has_halves(setup);
  return setup;
}
bool is_quantized(const SpeculationSetup& setup) { return setup.bits != 0 || has_halves(setup); }

Read middle_read(const SpeculationSetup& setup) {
  return setup.structure == Structure::halves ? Read::upper_half : Read::selected;
}

// Whether the target's cache holds every row exactly, so that a cache of another plan can take them over.
bool holds_every_row(const reference::Llama& model, const SpeculationSetup& setup) {
  return !is_quantized(setup) &&
         std::ranges::all_of(model.config().windows, [](std::size_t window) { return window == 0; });
}

std::size_t most_guesses(const SpeculationSetup& setup) {
  const SpeculationOptions& options = setup.options;
  const std::size_t most = std::max(options.length, options.adapt ? options.max_length : 0);
  return std::max(most, setup.structure == Structure::tree ? setup.tree_nodes : 0);
}

// Room for the draft tokens, the token before them, and what the middle level tries beyond them. A
// quantised cache commits rows max_rollback at a time, and no verification may cross such a commit,
// so a larger max_rollback cuts off fewer draft tokens.
CacheOptions cache_options(const SpeculationSetup& setup) {
  const std::size_t least = is_quantized(setup) ? 64 : 0;
  const std::size_t rows = std::max(most_guesses(setup) + 2, least);
  return {.max_rollback = rows, .max_append = rows};
}

// A tree defines its length itself, and plain decoding has length 0.
SpeculationOptions decoder_options(const SpeculationSetup& setup) {
  SpeculationOptions options = setup.options;
  if (setup.structure == Structure::tree) options.length = setup.tree_nodes;
  if (setup.structure == Structure::plain) options.length = 0;
  if (setup.structure == Structure::tree || setup.structure == Structure::plain) {
    options.adapt = false;
  }
  return options;
}

bool has_draft_cache(Structure structure) {
  return needs_small_model(structure) || structure == Structure::streaming;
}

double share(std::size_t part, std::size_t whole) {
  if (whole == 0) return std::numeric_limits<double>::quiet_NaN();
  return static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

std::span<const NamedStructure> structures() { return all_structures; }

const NamedStructure& named(Structure structure) {
  return *std::ranges::find(all_structures, structure, &NamedStructure::structure);
}

Structure structure_named(const std::string& name) {
  const auto found =
      std::ranges::find_if(all_structures, [&](const NamedStructure& s) { return name == s.name; });
  std::string names;
  for (const NamedStructure& s : all_structures) names += (names.empty() ? "" : ", ") + std::string{s.name};
  require(found != all_structures.end(), "'", name, "' is no way to decode; there are ", names);
  return found->structure;
}

bool needs_small_model(Structure structure) {
  return structure == Structure::triforce || structure == Structure::draft || structure == Structure::tree;
}

HeadPlan<bfloat16> target_plan(const ModelShape& shape, const SpeculationSetup& setup) {
  if (has_halves(setup)) {
    return HeadPlan<bfloat16>{shape, LowBitFormat::of_halves(shape).head<bfloat16>()};
  }
  return setup.min_max ? plan_with<MinMaxKey>(shape, setup) : plan_with<MeanKey>(shape, setup);
}

double LevelReport::acceptance() const { return share(accepted, judged); }
double LevelReport::tokens_per_pass() const { return share(tokens, passes); }

// The decoder keeps pointers to other members, so this object must not move.
struct SpeculativeText::Parts {
  Parts(const reference::Llama& target, const reference::Llama* small, const SpeculationSetup& chosen,
        Cache own, std::optional<Cache> drafts, std::span<const int> has_read)
      : model{&target},
        small_model{small},
        setup{with_halves(chosen)},
        reader{target},
        draft_reader{needs_small_model(chosen.structure) ? *small : target},
        cache{std::move(own)},
        draft_cache{std::move(drafts)},
        decoder{reader, cache, make_draft(has_read), decoder_options(chosen)} {}

  AnyDraft make_draft(std::span<const int> has_read) {
    switch (setup.structure) {
      case Structure::triforce:
        return corrected(add(std::make_shared<ModelDraft<Reader, Cache>>(draft_reader, *draft_cache,
                                                                         ModelDraftOptions{}, has_read)));
      case Structure::self:
      case Structure::halves: return corrected(AnyDraft{std::make_shared<NoDraft>()});
      case Structure::draft:
      case Structure::streaming:
        return add(std::make_shared<ModelDraft<Reader, Cache>>(draft_reader, *draft_cache,
                                                               ModelDraftOptions{}, has_read));
      case Structure::ngram:
        // A byte says less than a word, so longer n-grams are looked up.
        return add(std::make_shared<NgramDraft>(reader.vocabulary() == 256
                                                    ? NgramDraftConfig{.max_ngram = 12, .min_ngram = 4}
                                                    : NgramDraftConfig{}));
      case Structure::tree: {
        auto shape = best_tree(AcceptanceVectorConfig{}.prior, setup.tree_nodes);
        tree_levels = levels_of(shape);
        return add(std::make_shared<TreeDraft<Reader, Cache>>(draft_reader, *draft_cache, std::move(shape),
                                                              ModelDraftOptions{}, has_read));
      }
      case Structure::plain: break;
    }
    return AnyDraft{std::make_shared<NoDraft>()};
  }

  // Adds the lowest draft, which proposes without the help of another one, and keeps it for its
  // counters.
  template <class D>
  AnyDraft add(std::shared_ptr<D> draft) {
    prepare = [this, draft] {
      // One draft token is requested and ignored, because this makes the draft read the text.
      Random unused;
      DraftTokens guesses;
      draft->propose(decoder.text(), 1, {}, unused, guesses);
    };
    lowest.emplace(std::move(draft));
    return *lowest;
  }
  AnyDraft corrected(AnyDraft inner) {
    SelectedDraftOptions options = setup.middle;
    options.read = middle_read(setup);
    selected = std::make_shared<Selected>(reader, cache, std::move(inner), options);
    return AnyDraft{selected};
  }

  const reference::Llama* model;
  const reference::Llama* small_model;
  SpeculationSetup setup;
  Reader reader;
  Reader draft_reader;
  Cache cache;
  std::optional<Cache> draft_cache;
  std::shared_ptr<Selected> selected;
  std::optional<AnyDraft> lowest;
  std::function<void()> prepare;
  std::size_t tree_levels = 0;
  std::size_t draft_has_read = 0;  // of the text; 0 if unknown
  Decoder decoder;
};

SpeculativeText::SpeculativeText(const reference::Llama& model, const reference::Llama* small,
                                 const SpeculationSetup& setup) {
  require(!needs_small_model(setup.structure) || small != nullptr, "decoding by ",
          named(setup.structure).name, " needs a small model beside the target");
  const CacheOptions options = cache_options(setup);
  std::optional<Cache> drafts;
  if (has_draft_cache(setup.structure)) {
    drafts.emplace(plan_of_draft(drafts_itself(setup) ? model : *small, setup), options);
  }
  parts_ = std::make_unique<Parts>(model, small, setup, Cache{plan_of_target(model, setup), options},
                                   std::move(drafts), std::span<const int>{});
}
SpeculativeText::SpeculativeText(std::unique_ptr<Parts> parts) : parts_{std::move(parts)} {}
SpeculativeText::~SpeculativeText() = default;

void SpeculativeText::read(std::span<const int> tokens, const Report& report) {
  Parts& parts = *parts_;
  parts.decoder.reopen();
  parts.decoder.read_prompt(tokens, report);
  if (!parts.prepare || text().empty()) return;
  parts.prepare();
  parts.draft_has_read = text().size();
}

void SpeculativeText::reopen() { parts_->decoder.reopen(); }

DecodedStep SpeculativeText::step(std::size_t most) {
  parts_->draft_has_read = 0;
  return parts_->decoder.step(most);
}

std::unique_ptr<SpeculativeText> SpeculativeText::fork(const SpeculationSetup& setup) const {
  const Parts& from = *parts_;
  require(!needs_small_model(setup.structure) || from.small_model != nullptr, "decoding by ",
          named(setup.structure).name, " needs a small model beside the target");
  std::optional<Cache> drafts;
  std::span<const int> has_read;
  if (has_draft_cache(setup.structure)) {
    const bool own = drafts_itself(setup);
    HeadPlan<bfloat16> plan = plan_of_draft(own ? *from.model : *from.small_model, setup);
    const bool same = from.draft_cache && from.draft_has_read == text().size() &&
                      own == drafts_itself(from.setup) && plan == from.draft_cache->plan();
    if (same) {
      drafts.emplace(from.draft_cache->fork());
      has_read = text();
    } else if (own && holds_every_row(*from.model, from.setup)) {
      drafts.emplace(from.cache.fork_as(std::move(plan)));
      has_read = text().first(from.cache.tokens());
    } else {
      drafts.emplace(std::move(plan), from.cache.options());
    }
  }
  HeadPlan<bfloat16> plan = plan_of_target(*from.model, setup);
  Cache cache = plan == from.cache.plan() ? from.cache.fork() : from.cache.fork_as(std::move(plan));
  auto parts = std::make_unique<Parts>(*from.model, from.small_model, setup, std::move(cache),
                                       std::move(drafts), has_read);
  parts->decoder.continue_text(text());
  if (parts->prepare) {
    parts->prepare();
    parts->draft_has_read = text().size();
  }
  return std::unique_ptr<SpeculativeText>{new SpeculativeText{std::move(parts)}};
}

const SpeculationSetup& SpeculativeText::setup() const { return parts_->setup; }
std::span<const int> SpeculativeText::text() const { return parts_->decoder.text(); }

std::vector<LevelReport> SpeculativeText::levels() const {
  const Parts& parts = *parts_;
  const auto judging = [](std::string name, Read read, const LevelStatistics& did) {
    return LevelReport{std::move(name), did.verifications,  did.positions, did.accepted,
                       did.tokens,      did.verify_seconds, read};
  };
  std::vector<LevelReport> levels{judging("target", Read::all, parts.decoder.statistics())};
  if (parts.selected) {
    levels.push_back(judging(proposers()[1], middle_read(parts.setup), parts.selected->statistics()));
  }
  if (parts.lowest) {
    const DraftWork& work = parts.lowest->work();
    const std::size_t passes = parts.setup.structure == Structure::ngram  ? work.calls
                               : parts.setup.structure == Structure::tree ? work.calls * parts.tree_levels
                                                                          : work.guesses;
    levels.push_back({proposers().back(), passes, 0, 0, work.guesses, work.seconds});
  }
  return levels;
}

std::vector<std::string> SpeculativeText::proposers() const {
  switch (parts_->setup.structure) {
    case Structure::triforce: return {"target", "selected", "draft"};
    case Structure::self: return {"target", "selected"};
    case Structure::halves: return {"target", "upper half"};
    case Structure::draft: return {"target", "draft"};
    case Structure::streaming: return {"target", "streaming"};
    case Structure::ngram: return {"target", "n-gram"};
    case Structure::tree: return {"target", "tree"};
    case Structure::plain: break;
  }
  return {"target"};
}

std::size_t SpeculativeText::guessed() const { return parts_->decoder.statistics().draft_tokens; }
std::size_t SpeculativeText::refreshes() const { return parts_->decoder.refreshes(); }
std::size_t SpeculativeText::bytes() const { return parts_->cache.bytes(); }
std::size_t SpeculativeText::draft_bytes() const {
  return parts_->draft_cache ? parts_->draft_cache->bytes() : 0;
}

std::size_t SpeculativeText::bytes_read() const {
  const Parts& parts = *parts_;
  std::size_t bytes = 0;
  for (const LevelReport& level : levels()) {
    if (level.read) {
      bytes += level.passes * bytes_shown(parts.cache, *level.read);
    } else if (parts.draft_cache) {
      bytes += level.passes * bytes_shown(*parts.draft_cache, Read::all);
    }
  }
  return bytes;
}

std::string draft_folder_of(const std::string& model_folder) {
  std::string folder = model_folder;
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  return folder + "-draft";
}

void require_draft_folder(const std::string& folder) {
  std::error_code ignored;
  require<FormatError>(
      std::filesystem::exists(std::filesystem::path{folder} / "config.json", ignored), folder,
      ": no small model here, of the target's tokens; expected config.json and "
      "model.safetensors. Without one, triforce_generate has --method self, streaming and ngram");
}

}  // namespace kvpolicy::tools
