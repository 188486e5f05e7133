// SPDX-License-Identifier: Apache-2.0
//
// A cache in a file or stream: the prompt that many answers share is read once, and every later
// start of the program goes on after it. What is saved is everything that decides what comes next:
// rows as they are stored, the tail that can still be taken back, summaries, selections, kept
// queries and added-up attention. A loaded cache continues bit for bit like the one that was saved.
//
// docs/saved_cache.md says what is in the file and what a policy of one's own needs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <istream>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policy/head_settings.hpp>
#include <kvpolicy/state/archive.hpp>
#include <kvpolicy/state/new_file.hpp>
#include <kvpolicy/state/records.hpp>
#include <kvpolicy/state/regular_file.hpp>

namespace kvpolicy {

namespace detail {

/// Tells the settings of heads apart by a checksum of their values.
class SettingsDigest final : public FieldVisitor {
 public:
  [[nodiscard]] std::uint64_t value() const { return checksum(bytes_.bytes); }

 private:
  void joined(std::string_view name) override {
    archive_(checksum(std::as_bytes(std::span{name.data(), name.size()})));
  }
  void count(std::string_view, std::size_t& value) override { archive_(std::uint64_t{value}); }
  void number(std::string_view, double& value) override { archive_(value); }
  void flag(std::string_view, bool& value) override { archive_(value); }
  void choice(std::string_view, std::size_t& index, std::span<const std::string_view>) override {
    archive_(std::uint64_t{index});
  }
  void begin(std::string_view) override {}
  bool begin_optional(std::string_view, bool present) override {
    archive_(present);
    return present;
  }
  void end() override {}
  [[nodiscard]] bool is_writing() const override { return true; }

  ByteString bytes_;
  SavingArchive<ByteString> archive_{bytes_};
};

}  // namespace detail

/// The longest tag.
inline constexpr std::size_t max_tag_bytes = std::size_t{1} << 16;

class SavedPrefixes;

/// Writes and reads the inside of a KvCache; `save` and `load` below are what to call.
class SavedCache {
 public:
  template <class E, class Engine>
  static void write(const KvCache<E, Engine>& cache, ByteSink& sink, std::string_view tag) {
    require(tag.size() <= max_tag_bytes, "save: the tag has ", tag.size(), " bytes, must have at most ",
            max_tag_bytes);
    check_between_steps<typename KvCache<E, Engine>::Layer>("save", cache.layers_, cache.tokens());
    require_savable(cache.plan_);
    RecordWriter blocks{sink};
    SavingArchive<RecordWriter> archive{blocks};
    write_text(archive, tag);
    describe(archive, cache.plan_);
    write_rows(archive, cache);
    blocks.finish();
  }

  template <class E, class Engine>
  static void read(KvCache<E, Engine>& cache, std::istream& stream, std::string name, std::string_view tag,
                   bool alone) {
    static_cast<void>(held(cache.layers_));
    require_savable(cache.plan_);
    RecordReader blocks{stream, std::move(name)};
    LoadingArchive archive{blocks};
    check_tag(archive, tag, blocks.name());
    compare(archive, cache.plan_, blocks.name());
    Rows<E> rows = read_rows(archive, cache, blocks.name());
    blocks.finish(alone);
    rows.move_to(cache);
  }

  /// @throws ConfigError if a head's policy cannot be saved
  template <class E>
  static void require_savable(const HeadPlan<E>& plan) {
    plan.for_each_head([](std::size_t layer, std::size_t head, const HeadSettings<E>& settings) {
      require(settings.is_savable(), "saved cache: KV head ", head, " of layer ", layer, " has ",
              settings.names().policy,
              ", which cannot be saved; to be, a policy needs a `name`, "
              "`template <class Archive> void serialize(Archive&)`, and its Config `void "
              "fields(FieldVisitor&)`");
    });
  }

  /// Tells a plan from others: its shape and element type, and the policy and settings of each head.
  template <class E>
  [[nodiscard]] static std::uint64_t digest_of(const HeadPlan<E>& plan) {
    ByteString bytes;
    SavingArchive<ByteString> archive{bytes};
    describe(archive, plan);
    return checksum(bytes.bytes);
  }

 private:
  friend class SavedPrefixes;  // many caches in one file: cache/saved_prefixes.hpp

  // What was read, before it becomes what a cache holds.
  template <Element E>
  struct Rows {
    std::vector<CacheLayer<E>> layers;
    std::size_t observed_rows = 0;

    template <class Cache>
    void move_to(Cache& cache) {
      cache.layers_ = std::move(layers);
      cache.calls_.observed_rows() = observed_rows;
    }
  };

  template <class E, class Engine>
  static void write_rows(SavingArchive<RecordWriter>& archive, const KvCache<E, Engine>& cache) {
    const std::size_t tokens = cache.tokens();
    archive(tokens, cache.calls_.observed_rows());
    for (std::size_t l = 0; l < cache.layers_.size(); ++l) {
      // A saving archive changes nothing.
      transfer(archive, const_cast<typename KvCache<E, Engine>::Layer&>(cache.layers_[l]), tokens, cache);
    }
  }
  template <class E, class Engine>
  [[nodiscard]] static Rows<E> read_rows(LoadingArchive& archive, const KvCache<E, Engine>& cache,
                                         const std::string& name) {
    std::size_t tokens = 0;
    Rows<E> rows;
    archive(tokens, rows.observed_rows);
    const std::size_t most = cache.options_.max_tokens;
    require<CapacityError>(most == 0 || tokens <= most, name, ": holds ", tokens, " tokens, max_tokens is ",
                           most);
    require<FormatError>(tokens <= max_text_tokens, name, ": holds ", tokens, " tokens, must be at most ",
                         max_text_tokens);
    rows.layers = cache.new_layers();
    for (auto& layer : rows.layers) transfer(archive, layer, tokens, cache);
    return rows;
  }

  static void check_tag(LoadingArchive& archive, std::string_view tag, const std::string& name) {
    const std::string found = read_text(archive, name);
    require<FormatError>(found == tag, name, ": has the tag ", shown(found), ", must be ", shown(tag));
  }

  template <class Archive>
  static void write_text(Archive& archive, std::string_view text) {
    archive(text.size());
    archive.bytes(std::as_bytes(std::span{text}));
  }
  [[nodiscard]] static std::string read_text(LoadingArchive& archive, const std::string& name) {
    std::size_t size = 0;
    archive(size);
    require<FormatError>(size <= max_tag_bytes, name, ": has a text of ", size, " bytes, must have at most ",
                         max_tag_bytes);
    std::string text(size, '\0');
    archive.bytes(std::as_writable_bytes(std::span{text}));
    return text;
  }
  // A tag may be anything: what can be read of it.
  [[nodiscard]] static std::string shown(std::string_view tag) {
    std::string text{tag.substr(0, 80)};
    for (char& letter : text) {
      if (letter < ' ' || letter > '~') letter = '?';
    }
    return message('"', text, '"', tag.size() > text.size() ? "..." : "");
  }

  // ---- the plan

  struct HeadDescription {
    std::string policy;
    std::uint64_t settings = 0;
  };

  template <class E>
  [[nodiscard]] static HeadDescription description(const HeadPlan<E>& plan, std::size_t layer,
                                                   std::size_t head) {
    const HeadSettings<E>& settings = plan.at(layer, head);
    detail::SettingsDigest digest;
    settings.write_fields(digest);
    return {settings.names().shown(), digest.value()};
  }

  template <class Archive, class E>
  static void describe(Archive& archive, const HeadPlan<E>& plan) {
    write_shape(archive, plan.shape());
    write_text(archive, name_of(encoding_of<E>));
    plan.for_each_head([&](std::size_t layer, std::size_t head, const auto&) {
      const HeadDescription one = description(plan, layer, head);
      write_text(archive, one.policy);
      archive(one.settings);
    });
  }

  // Four numbers where all layers are alike. Otherwise zeros in the place of the heads and channels, and all
  // about each layer, of which the checksum tells whether it is the same.
  template <class Archive>
  static void write_shape(Archive& archive, const ModelShape& shape) {
    const LayerShape first = shape.is_uniform() ? shape.layer(0) : LayerShape{};
    archive(shape.layers, first.q_heads, first.kv_heads, first.head_dim);
    if (first.kv_heads == 0) archive(checksum_of(shape));
  }
  [[nodiscard]] static std::uint64_t checksum_of(const ModelShape& shape) {
    ByteString bytes;
    SavingArchive<ByteString> archive{bytes};
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const LayerShape own = shape.layer(l);
      archive(own.q_heads, own.kv_heads, own.head_dim, own.value_dim, own.window, own.softcap,
              shape.cache_of(l));
    }
    return checksum(bytes.bytes);
  }

  template <class E>
  static void compare(LoadingArchive& archive, const HeadPlan<E>& plan, const std::string& name) {
    compare_shapes(archive, plan.shape(), name);
    const std::string element = read_text(archive, name);
    const std::string_view own_element = name_of(encoding_of<E>);
    require<FormatError>(element == own_element, name, ": holds rows in ", shown(element), ", must be ",
                         own_element);
    plan.for_each_head([&](std::size_t layer, std::size_t head, const auto&) {
      const HeadDescription expected = description(plan, layer, head);
      HeadDescription one;
      one.policy = read_text(archive, name);
      archive(one.settings);
      require<FormatError>(one.policy == expected.policy, name, ": KV head ", head, " of layer ", layer,
                           " is ", shown(one.policy), ", must be \"", expected.policy, '"');
      require<FormatError>(one.settings == expected.settings, name, ": KV head ", head, " of layer ", layer,
                           " is ", shown(one.policy),
                           " with other settings than in the plan, must have the same");
    });
  }

  static void compare_shapes(LoadingArchive& archive, const ModelShape& own, const std::string& name) {
    LayerShape first;
    std::size_t layers = 0;
    archive(layers, first.q_heads, first.kv_heads, first.head_dim);
    const auto in_words = [](std::size_t count, const LayerShape& layer) {
      return layer.kv_heads == 0 ? message(count, " layers that differ")
                                 : message(count, " layers, ", layer.q_heads, " query heads, ",
                                           layer.kv_heads, " KV heads of ", layer.head_dim);
    };
    const LayerShape own_first = own.is_uniform() ? own.layer(0) : LayerShape{};
    require<FormatError>(layers == own.layers && first.q_heads == own_first.q_heads &&
                             first.kv_heads == own_first.kv_heads && first.head_dim == own_first.head_dim,
                         name, ": is of a model of ", in_words(layers, first), ", must be ",
                         in_words(own.layers, own_first));
    if (own_first.kv_heads > 0) return;
    std::uint64_t found = 0;
    archive(found);
    require<FormatError>(found == checksum_of(own), name, ": is of a model of ", layers,
                         " layers that differ in another way than those of the plan");
  }

  // ---- the rows

  template <class Archive, class Layer, class Cache>
  static void transfer(Archive& archive, Layer& layer, std::size_t tokens, const Cache& cache) {
    const std::size_t number = layer.number;
    archive.enter({number, 0, tokens});
    archive(layer.committed, layer.scale, layer.softcap, layer.attention_sink_bias);
    if constexpr (Archive::loading) check(archive, layer, tokens, cache);
    layer.queries.serialize(archive, tokens);
    layer.tail.serialize(archive, layer.committed, tokens);
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      archive.enter({number, head, layer.committed});
      Head& own = *layer.heads[head];
      if constexpr (Archive::loading) {
        own.load(archive);
        own.reserve(0);  // full pages go to slow memory
        own.release_unused();
      } else {
        own.save(archive);
      }
    }
    if constexpr (Archive::loading) layer.tokens = tokens;
  }

  template <class Layer, class Cache>
  static void check(const LoadingArchive& archive, const Layer& layer, std::size_t tokens,
                    const Cache& cache) {
    archive.check(layer.committed <= tokens, "at most ", tokens, " committed rows");
    const std::size_t room = cache.options_.tail_rows();
    require<CapacityError>(tokens - layer.committed <= room, "load: layer ", layer.number, " has ",
                           tokens - layer.committed,
                           " rows that can be taken back, the cache has room for max_rollback + "
                           "max_append = ",
                           room, "; it takes more of them, or commit before saving");
    archive.check(!layer.scale || is_finite(*layer.scale), "a finite scale");
    archive.check(is_finite(layer.softcap) && layer.softcap >= 0.0F, "a finite softcap");
    const std::size_t q_heads = layer.shape.q_heads;
    archive.check(layer.attention_sink_bias.empty() || layer.attention_sink_bias.size() == q_heads,
                  "a sink logit for each of ", q_heads, " query heads, or none");
    archive.check(std::ranges::none_of(layer.attention_sink_bias, [](float x) { return is_nan(x); }),
                  "sink logits that are numbers");
  }
};

/// Writes all that a cache holds. The cache stays as it is; rows that may still be taken back are
/// saved as such. `tag` is the caller's: whatever must be the same for the rows to make sense, such
/// as the model's name and a hash of the tokens. A fork may be saved by another thread while its
/// cache goes on.
/// @throws RollbackError inside a step or while a tree of guesses is pending; ConfigError for a tag
/// beyond 64 KiB; StorageError if the stream does not take it all, or slow memory cannot be read
template <class E, class Engine>
void save(const KvCache<E, Engine>& cache, std::ostream& stream, std::string_view tag = {}) {
  StreamSink sink{stream};
  SavedCache::write(cache, sink, tag);
}

/// The same to a file, which is replaced as a whole once everything is on the disk: whatever fails
/// or crashes before leaves the old file as it was. After a crash a file `<path>.partial-<number>`
/// may be left over. A cache holds what its prompt said, so a new file is its owner's alone; one
/// that was there keeps its permissions, and a symbolic link goes on pointing to it.
/// @throws as above; StorageError if the file cannot be written, or is a device, a pipe or a folder
template <class E, class Engine>
void save(const KvCache<E, Engine>& cache, const std::filesystem::path& path, std::string_view tag = {}) {
  NewFile file{path, NewFileAccess::owner};
  SavedCache::write(cache, file, tag);
  file.replace();
}

/// The cache becomes what was saved: same tokens, rows, selections, commit points. Its plan must be
/// the one that was saved, as must `tag`; its options and its engine are its own, so pages may be
/// of another size and rows may go to slow memory. What it held goes, once all is read: whatever
/// throws leaves it as it was. `stream` then stands right after what was saved.
/// @throws FormatError if this is no saved cache, was made by another version, on a machine of the
/// other byte order, for another plan, shape, element type or tag, is cut off or damaged;
/// CapacityError if max_tokens or the tail are too small for it; StorageError, std::bad_alloc
template <class E, class Engine>
void load(KvCache<E, Engine>& cache, std::istream& stream, std::string_view tag = {}) {
  SavedCache::read(cache, stream, "saved cache", tag, /*alone=*/false);
}

/// The same from a file, in which nothing else may stand.
/// @throws as above; StorageError if there is no such file, it cannot be read, or it is a device, a
/// pipe or a folder: open a stream for what comes from a pipe
template <class E, class Engine>
void load(KvCache<E, Engine>& cache, const std::filesystem::path& path, std::string_view tag = {}) {
  const std::string name = path.string();
  require_regular_file<StorageError>(path);
  std::ifstream file{path, std::ios::binary};
  require<StorageError>(file.good(), name, ": cannot be opened");
  SavedCache::read(cache, file, name, tag, /*alone=*/true);
}

}  // namespace kvpolicy
