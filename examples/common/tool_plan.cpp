// SPDX-License-Identifier: Apache-2.0
#include "../tool_plan.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <vector>

#include <fmt/format.h>

#include <kvpolicy/duo.hpp>
#include <kvpolicy/format.hpp>
#include <kvpolicy/headkv.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/head_scores.hpp>
#include <kvpolicy/io/named_plan.hpp>
#include <kvpolicy/io/plan_json.hpp>
#include <kvpolicy/kivi.hpp>
#include <kvpolicy/plan/share_budgets.hpp>
#include <kvpolicy/policy/expected_attention_scorer.hpp>
#include <kvpolicy/policy/key_diff_scorer.hpp>
#include <kvpolicy/policy/kvzip_scorer.hpp>
#include <kvpolicy/pyramidkv.hpp>
#include <kvpolicy/streaming_llm.hpp>
#include <reference_model/config.hpp>

#include "error_text.hpp"
#include "head_files.hpp"
#include "pattern_folder.hpp"
#include "plan_name.hpp"
#include "plan_search.hpp"
#include "run_tool.hpp"

namespace kvpolicy::tools {
namespace {

namespace fs = std::filesystem;

// The bits of kivi4 and kivi2; 0 for any other text.
std::size_t kivi_bits(std::string_view name) { return name == "kivi4" ? 4 : name == "kivi2" ? 2 : 0; }

// Takes what the name of a plan says of its bound.
Reading bound_of(PlanName& name) {
  name.place({"epsilon"});
  const double epsilon = name.number("epsilon", 0.05);
  require(epsilon >= 0 && epsilon <= 1, "epsilon is ", epsilon, ", must be a share of the attention, 0 to 1");
  return {.read = Read::bounded,
          .epsilon = static_cast<float>(epsilon),
          .certainty = name.choice("certainty", Certainty::sure)};
}

// Whose rows compete for the heads' budgets.
enum class Competitors : std::uint8_t { head, layer, model };
[[nodiscard]] constexpr std::array<std::string_view, 3> names_of(Competitors) {
  return {"head", "layer", "model"};
}

class Maker {
 public:
  using Plan = HeadPlan<bfloat16>;
  using Dense = DenseStorage<bfloat16>;
  using Codes = PerTokenStorage<bfloat16>;

  Maker(const PlanArguments& arguments, const ModelShape& shape, const fs::path& weights)
      : arguments_{arguments}, shape_{shape}, weights_{weights}, spec_{arguments.plan} {}

  [[nodiscard]] Plan make() {
    Plan plan = by_name();
    constexpr std::string_view sourced[]{"bounded", "duo",     "expected", "headkv",
                                         "keydiff", "keynorm", "search"};
    require(spec_.source.empty() || std::ranges::count(sourced, spec_.name) > 0, spec_.name,
            " takes no file, but the name has '", spec_.source, "'");
    spec_.refuse_others();
    return plan;
  }
  [[nodiscard]] const io::OrderedJson& settings() const { return spec_.settings(); }

 private:
  [[nodiscard]] Plan by_name() {
    if (spec_.name == "full") return full();
    if (spec_.name == "sink_recent") return sink_recent();
    if (io::is_precision_name(spec_.name)) return quantized();
    if (spec_.name == "bounded") return bounded();
    if (kivi_bits(spec_.name) != 0) return kivi();
    if (spec_.name == "chunk") return chunks<MeanKey>();
    if (spec_.name == "quest") return chunks<MinMaxKey>();
    if (spec_.name == "duo") {
      spec_.place({"sparsity"});
      return duo(source_or("duo", "gates, as duo@FOLDER does"));
    }
    if (spec_.name == "headkv") {
      spec_.place({"capacity", "window"});
      return headkv(
          source_or(fs::path{"headkv"} / "retrieval_heads.json", "head scores, as headkv@FILE does"));
    }
    if (spec_.name == "snapkv") return budgets<SnapKvScorer>();
    if (spec_.name == "adakv") return budgets<SnapKvScorer>(Competitors::layer);
    if (spec_.name == "criticalkv") return budgets<SnapKvScorer>();
    if (spec_.name == "tova") return budgets<TovaScorer>();
    if (spec_.name == "h2o") return budgets<H2oScorer>();
    if (spec_.name == "keynorm") return budgets<KeyNormScorer>();
    if (spec_.name == "keydiff") return budgets<KeyDiffScorer>();
    if (spec_.name == "kvzip") return budgets<KvZipScorer>(Competitors::model);
    if (spec_.name == "expected") return budgets<ExpectedAttentionScorer>();
    if (spec_.name == "pyramid") return pyramid();
    if (spec_.name == "streaming_llm") return streaming_llm();
    if (spec_.name == "search") return search();
    return from_path();
  }

  // Bytes are those of rows: pages are as small as every choice allows, and queries are not
  // counted. All plans that are compared at equal bytes are counted this way.
  [[nodiscard]] Plan search() {
    spec_.place({"share", "context"});
    spec_.require_exact_rows();
    const double share = spec_.number("share", 0.125);
    require(share > 0 && share <= 1, "the share of the bytes is ", share, ", must be above 0 and at most 1");
    const std::size_t context = spec_.count("context", 4096);
    HeadKnowledge known{.weights = weights_.string()};
    if (!spec_.source.empty()) known.damage = spec_.source;
    const auto menu = search_choices(known, shape_, context);
    CacheOptions options{.page_rows = 32};
    std::size_t queries = 0;
    for (const auto& choice : menu.choices) {
      const HeadRule rule = choice.settings.rule(shape_.head_dim);
      if (rule.key_per_channel)
        options.page_rows = std::max(options.page_rows, std::bit_ceil(rule.key_group));
    }
    for (const auto& choice : menu.choices) {
      queries = std::max(queries, HeadPlan<bfloat16>{shape_, choice.settings}.memory(0, options).queries);
    }
    const MemoryEstimate all = HeadPlan<bfloat16>{shape_}.memory(context, options);
    const auto rows = static_cast<std::size_t>(share * static_cast<double>(all.heads));
    return search_plan<bfloat16>(shape_, menu.choices,
                                 {.bytes = rows + all.tail + queries, .context = context, .options = options})
        .plan;
  }

  [[nodiscard]] Plan full() {
    spec_.place({});
    spec_.require_exact_rows();
    return Plan{shape_, typename FullCache<Dense>::Config{}};
  }

  [[nodiscard]] Plan quantized() {
    spec_.place({"residual"});
    spec_.require_exact_rows();
    return io::low_bit_plan<bfloat16>(spec_, spec_.name, shape_);
  }

  // How it is read, `reading_of` says.
  [[nodiscard]] Plan bounded() {
    static_cast<void>(bound_of(spec_));
    if (!spec_.source.empty()) return bounded_file();
    const std::size_t residual = spec_.count("residual", 128);
    const LowBits bits = spec_.storage.empty() ? LowBits{8, 4} : io::low_bits_named(spec_.storage);
    require(bits.keys == 8, spec_.storage,
            " is not int8, or keys of 8 bits such as k8v4: bounds are by the upper 4 of 8");
    LowBitFormat format = LowBitFormat::of_bounded(shape_, bits.values, residual);
    format.storage.key_group = spec_.count("key_group", format.storage.key_group);
    format.sinks = spec_.count("sinks", format.sinks);
    format = format.rotated(spec_.choice("hadamard", format.hadamard()));
    return Plan{shape_, format.head<bfloat16>()};
  }

  // A plan file of which some heads have keys in halves.
  [[nodiscard]] Plan bounded_file() {
    spec_.require_exact_rows();
    Plan plan = of_this_model(io::load_plan<bfloat16>(spec_.source), spec_.source);
    bool any = false;
    plan.for_each_head([&](std::size_t, std::size_t, const HeadSettings<bfloat16>& settings) {
      any = any || is_in_halves(settings.rule(shape_.head_dim).key_encoding);
    });
    require(any, spec_.source, ": no head has its keys in halves, so no read of it has a bound");
    return plan;
  }

  [[nodiscard]] Plan kivi() {
    spec_.place({"residual"});
    spec_.require_exact_rows();
    const KiviConfig published;
    return kivi_plan<bfloat16>(shape_, {.bits = kivi_bits(spec_.name),
                                        .group = spec_.count("group", channel_group(shape_)),
                                        .residual = spec_.count("residual", published.residual),
                                        .flush = spec_.choice("flush", published.flush)});
  }

  [[nodiscard]] Plan sink_recent() {
    spec_.place({"sinks", "recent"});
    const std::size_t sinks = spec_.count("sinks", arguments_.sinks.value_or(16));
    const std::size_t recent = spec_.count("recent", arguments_.recent.value_or(128));
    const Mask mask = spec_.choice("mask", Mask::exact);
    if (spec_.storage.empty()) {
      return Plan{shape_,
                  typename SinkRecentCache<Dense>::Config{.sinks = sinks, .recent = recent, .mask = mask}};
    }
    return Plan{shape_, typename SinkRecentCache<Codes>::Config{
                            .sinks = sinks,
                            .recent = recent,
                            .mask = mask,
                            .storage = io::row_format(spec_, spec_.storage, shape_, 32)}};
  }

  template <class Summary>
  [[nodiscard]] Plan chunks() {
    spec_.place({"chunk", "budget"});
    const std::size_t chunk = spec_.count("chunk", 16);
    const std::size_t budget = spec_.count("budget", 1024);
    if (spec_.storage.empty()) {
      return Plan{shape_,
                  typename ChunkRetrievalCache<Dense, Summary>::Config{.chunk = chunk, .budget = budget}};
    }
    return Plan{
        shape_,
        typename ChunkRetrievalCache<Codes, Summary>::Config{
            .chunk = chunk, .budget = budget, .storage = io::row_format(spec_, spec_.storage, shape_, 128)}};
  }

  [[nodiscard]] Plan duo(const fs::path& path) {
    const fs::path folder = pattern_folder(path);
    const io::DuoPattern pattern = io::load_duo_pattern(folder);
    const DuoConfig config{.sparsity = spec_.number("sparsity", arguments_.sparsity),
                           .sinks = spec_.count("sinks", arguments_.sinks.value_or(pattern.sinks)),
                           .recent = spec_.count("recent", arguments_.recent.value_or(pattern.recent)),
                           .mask = spec_.choice("mask", Mask::exact),
                           .gate_cut = spec_.choice("rule", arguments_.gate_cut)};
    require(config.sparsity >= 0 && config.sparsity <= 1, "the sparsity is ", config.sparsity,
            ", must be a share of the heads, 0 to 1");
    if (config.gate_cut == GateCut::exact_count) {
      const Highest kept =
          named_by(folder.string(), [&] { return highest_gates(pattern.gates, config.sparsity); });
      if (kept.tied > 0) {
        spec_.record(tied_heads, kept.tied);
        spec_.record(tied_heads_kept, kept.tied_in);
      }
    }
    if (spec_.storage.empty()) {
      return named_by(folder.string(), [&] { return duo_plan<bfloat16>(shape_, pattern.gates, config); });
    }
    const HeadSettings<bfloat16> retrieval = io::text_format(spec_, spec_.storage, shape_).head<bfloat16>();
    return named_by(folder.string(),
                    [&] { return duo_plan<bfloat16>(shape_, pattern.gates, config, retrieval); });
  }

  [[nodiscard]] Plan headkv(const fs::path& scores) {
    HeadKvConfig config = arguments_.headkv;
    config.capacity = spec_.count("capacity", config.capacity);
    config.observation_window = spec_.count("window", config.observation_window);
    config.beta = spec_.number("beta", config.beta);
    config.score_power = spec_.number("score_power", config.score_power);
    config.keep_short_prompts = spec_.flag("keep_short_prompts", config.keep_short_prompts);
    const SnapKvScorer::Config scorer = this->scorer(config.scorer());
    config.pooling = scorer.pooling;
    config.kernel = scorer.kernel;
    config.budgets().validate();
    SnapKvScorer::validate(scorer);
    const HeadScores loaded = io::load_head_scores(scores);
    if (spec_.storage.empty()) {
      return named_by(scores.string(), [&] { return headkv_plan<bfloat16>(shape_, loaded, config); });
    }
    const ResidualConfig quantized = io::row_format(spec_, spec_.storage, shape_, 0);
    return named_by(scores.string(),
                    [&] { return quantized_headkv_plan<bfloat16>(shape_, loaded, config, quantized); });
  }

  // The capacity is the same for every head, or an average where the name has a file of shares. `usual`: whose rows
  // compete for it if the name does not say.
  template <class Scorer>
  [[nodiscard]] Plan budgets(Competitors usual = Competitors::head) {
    constexpr bool votes = std::same_as<Scorer, SnapKvScorer>;
    constexpr bool expects = std::same_as<Scorer, ExpectedAttentionScorer>;
    // Scorers that need no question, which budgets by head do without reading a prompt twice.
    constexpr bool shares =
        expects || std::same_as<Scorer, KeyDiffScorer> || std::same_as<Scorer, KeyNormScorer>;
    const bool by_share = shares && !spec_.source.empty();
    if (by_share) {
      spec_.place({"capacity", "context"});
    } else {
      votes || expects ? spec_.place({"capacity", "window"}) : spec_.place({"capacity"});
    }
    const std::size_t capacity = spec_.count("capacity", arguments_.headkv.capacity);
    constexpr bool competes = !std::same_as<Scorer, TovaScorer> && !std::same_as<Scorer, H2oScorer>;
    const Competitors competitors = competes && !by_share ? spec_.choice("compete", usual) : usual;
    const auto make = [&]<class Storage>(std::type_identity<Storage>, const auto& storage) {
      typename HeadBudgetCache<Storage, Scorer>::Config config;
      config.storage = storage;
      config.adaptive_in_layer = competitors == Competitors::layer;
      config.adaptive_in_model = competitors == Competitors::model;
      // Ada-KV keeps a share of each head's rows safe; KVzip's threshold knows no head.
      if (competitors == Competitors::model) config.safeguard = 0;
      if (competitors != Competitors::head) config.safeguard = spec_.number("safeguard", config.safeguard);
      if constexpr (votes) {
        config.scorer = arguments_.headkv.scorer();
        config.scorer.observation_window = spec_.count("window", config.scorer.observation_window);
        config.scorer = scorer(config.scorer);
        config.scorer.votes = spec_.choice("votes", config.scorer.votes);
        if (config.scorer.votes == Votes::largest) config.scorer.prior_share = spec_.number("prior_share", 0);
      }
      if constexpr (expects) {
        require(!weights_.empty(),
                "must know how the model rotates its keys; give the model, or keydiff as the plan");
        config.scorer.rotary = reference::load_llama_config(weights_.string()).rotary;
        config.scorer.observation_window = spec_.count("window", config.scorer.observation_window);
        config.scorer.future = spec_.count("future", config.scorer.future);
      }
      if constexpr (votes || expects || std::same_as<Scorer, KvZipScorer>) {
        const bool critical = spec_.name == "criticalkv";
        config.weigh_values = spec_.flag("weigh_values", expects || critical);
        if (config.weigh_values) {
          config.value_norm =
              spec_.choice("value_norm", critical ? ValueNorm::output_l1 : ValueNorm::value_l2);
          config.unweighed_share = spec_.number("unweighed_share", critical ? 0.5 : 0.0);
        }
      }
      if constexpr (std::same_as<Scorer, H2oScorer>) config.scorer.recent = capacity / 2;
      if constexpr (std::same_as<Scorer, H2oScorer> || std::same_as<Scorer, TovaScorer>) {
        config.compress_every = 1;  // as published: at each decoded token
        config.after_first_compress = true;
      }
      const std::size_t kept = Scorer::kept_rows(config.scorer);
      require(capacity > 0 && capacity >= kept, "a capacity of ", capacity,
              " rows, must be at least 1 and at least the ", kept, " latest rows that are always kept");
      config.budget = capacity - kept;
      if (by_share) return plan_of_shares(config, kept);
      return Plan{shape_, config};
    };
    if constexpr (votes) {
      if (!spec_.storage.empty()) {
        return make(std::type_identity<Codes>{},
                    static_cast<typename Codes::Config>(io::row_format(spec_, spec_.storage, shape_, 0)));
      }
    }
    spec_.require_exact_rows();
    return make(std::type_identity<Dense>{}, typename Dense::Config{});
  }

  // Divides the rows that all heads have besides `kept` ones by the shares in the file that the name gives.
  template <PolicyConfig Config>
  [[nodiscard]] Plan plan_of_shares(const Config& config, std::size_t kept) {
    const std::size_t context = spec_.count("context", 4096);
    require(context > kept, "a context of ", context, " rows, must be more than the ", kept,
            " latest rows that are always kept");
    const HeadShares shares = io::load_head_scores(spec_.source);
    return named_by(spec_.source, [&] {
      return plan_of_budgets<bfloat16>(
          shape_, share_budgets(shares, {.capacity = config.budget, .most_rows = context - kept}), config);
    });
  }

  [[nodiscard]] Plan pyramid() {
    spec_.place({"capacity", "window"});
    spec_.require_exact_rows();
    PyramidKvConfig config;
    config.capacity = spec_.count("capacity", arguments_.headkv.capacity);
    config.observation_window = spec_.count("window", arguments_.headkv.observation_window);
    config.beta = spec_.number("beta", config.beta);
    config.keep_short_prompts = spec_.flag("keep_short_prompts", config.keep_short_prompts);
    const SnapKvScorer::Config scorer = this->scorer(config.scorer());
    config.pooling = scorer.pooling;
    config.kernel = scorer.kernel;
    return pyramidkv_plan<bfloat16>(shape_, config);
  }

  [[nodiscard]] Plan streaming_llm() {
    spec_.place({"sinks", "recent"});
    spec_.require_exact_rows();
    require(!weights_.empty(),
            "must know how the model rotates its keys; give the model, or "
            "sink_recent as the plan");
    const StreamingLlmConfig published;
    return streaming_llm_plan<bfloat16>(
        shape_, {.sinks = spec_.count("sinks", arguments_.sinks.value_or(published.sinks)),
                 .recent = spec_.count("recent", arguments_.recent.value_or(published.recent)),
                 .mask = spec_.choice("mask", published.mask),
                 .rotary_in_cache = reference::load_llama_config(weights_.string()).rotary});
  }

  // A text that is no name is a path: a folder is a pattern, and a file shows by its content what
  // it is. A + or : is then part of the path.
  [[nodiscard]] Plan from_path() {
    const fs::path path{arguments_.plan};
    require_plan_source(arguments_.plan);
    spec_ = PlanName{""};
    spec_.text = spec_.name = arguments_.plan;
    if (is_pattern_path(path)) return duo(path);
    const std::string text = io::read_text_file(path);
    const io::Json json = io::parse_json(text, path.string());
    if (!json.is_object() || !json.contains("format")) return headkv(path);
    return of_this_model(io::parse_plan<bfloat16>(text, path.string()), path.string());
  }

  [[nodiscard]] Plan of_this_model(Plan plan, const std::string& path) const {
    require(plan.shape() == shape_, path, ": is a plan for ", fmt::format("{}", plan.shape()),
            "; the model has ", fmt::format("{}", shape_));
    return plan;
  }

  // The source that the name gives, or else what is known about the model's heads.
  [[nodiscard]] fs::path source_or(const fs::path& beside, const char* what) const {
    if (!spec_.source.empty()) return spec_.source;
    require(!weights_.empty(), "needs a file beside a model's weights: give the model, or the ", what);
    return require_head_file(weights_, beside);
  }

  [[nodiscard]] SnapKvScorer::Config scorer(SnapKvScorer::Config config) {
    config.pooling = spec_.choice("pooling", config.pooling);
    config.kernel = spec_.count("kernel", config.kernel);
    return config;
  }

  const PlanArguments& arguments_;
  const ModelShape& shape_;
  const fs::path& weights_;
  PlanName spec_;
};

}  // namespace

void require_plan_source(const std::string& plan) {
  const PlanName spec{plan};
  constexpr std::string_view names[]{"full",     "bounded", "sink_recent",   "chunk",   "quest",
                                     "duo",      "headkv",  "snapkv",        "adakv",   "criticalkv",
                                     "tova",     "h2o",     "keynorm",       "keydiff", "kvzip",
                                     "expected", "pyramid", "streaming_llm", "search"};
  const bool named = std::ranges::count(names, spec.name) > 0 || io::is_precision_name(spec.name) ||
                     kivi_bits(spec.name) != 0;
  std::error_code ignored;
  require(named || fs::exists(plan, ignored), "--plan ", plan,
          ": is neither the name of a plan nor a file or folder. Known:\n", plan_help());
}

Reading reading_of(const std::string& plan, const PlanNeeds& needs) {
  if (PlanName name{plan}; name.name == "bounded") return bound_of(name);
  return {.read = needs.selected_reads ? Read::selected : Read::all,
          .refresh_each_step = needs.selected_reads};
}

void require_no_bound(const std::string& plan, std::string_view tool) {
  require(PlanName{plan}.name != "bounded", "--plan ", plan, ": is read with a bound, which ", tool,
          " does not do; generate, compare, evaluate and visualize do");
}

void add_plan_options(CLI::App& app, PlanArguments& arguments) {
  constexpr std::uint64_t most = std::uint64_t{1} << 40;
  app.add_option("--plan", arguments.plan, "What each KV head keeps: a name, file or folder, below")
      ->type_name("PLAN")
      ->capture_default_str();
  app.add_option("--sparsity", arguments.sparsity, "DuoAttention: share of streaming heads")
      ->check(number_from(0, 1))
      ->capture_default_str();
  app.add_flag_callback(
      "--threshold", [&arguments] { arguments.gate_cut = GateCut::threshold; },
      "DuoAttention: keep all heads with gates from the quantile on, not an exact count. This is the "
      "published rule without the noise that the published code adds to the gates, so tied heads are "
      "all kept (all 1,024 of the Llama-2 pattern at 0.25)");
  app.add_option("--sinks", arguments.sinks,
                 "DuoAttention: first rows of streaming heads (default: as the pattern says)")
      ->check(whole_number(0, most));
  app.add_option("--recent", arguments.recent,
                 "DuoAttention: latest rows of streaming heads (default: as the pattern says)")
      ->check(whole_number(1, most));
  app.add_option("--capacity", arguments.headkv.capacity, "HeadKV: rows per head on average, window included")
      ->check(whole_number(1, most))
      ->capture_default_str();
  app.add_option("--window", arguments.headkv.observation_window, "HeadKV: latest rows, whose queries vote")
      ->check(whole_number(1, most))
      ->capture_default_str();
  app.add_option("--beta", arguments.headkv.beta, "HeadKV: 1 / beta of the rows go by score")
      ->check(number_from(1, 1e9))
      ->capture_default_str();
}

template <>
HeadPlan<bfloat16> make_plan<bfloat16>(const PlanArguments& arguments, const ModelShape& shape,
                                       const fs::path& weights, io::OrderedJson* settings) {
  shape.validate();
  try {
    Maker maker{arguments, shape, weights};
    HeadPlan<bfloat16> plan = maker.make();
    if (settings != nullptr) *settings = maker.settings();
    return plan;
  } catch (const ConfigError& error) {
    if (std::string_view{error.what()}.starts_with("--plan ")) throw;
    return named_by("--plan " + arguments.plan, [&]() -> HeadPlan<bfloat16> { throw; });
  }
}

}  // namespace kvpolicy::tools
