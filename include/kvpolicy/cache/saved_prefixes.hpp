// SPDX-License-Identifier: Apache-2.0
//
// Prefixes in a folder, so that a server that starts again need not read them again. There is one file for each
// plan, whose name is made from the plan. Pages that prefixes share are written once and are shared again when
// they are loaded.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <kvpolicy/cache/prefix_cache.hpp>
#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/state/new_file.hpp>
#include <kvpolicy/state/records.hpp>
#include <kvpolicy/state/regular_file.hpp>
#include <kvpolicy/storage/saved_pages.hpp>

namespace kvpolicy {

/// Writes and reads the inside of a PrefixCache; `save` and `load` below are what to call.
class SavedPrefixes {
 public:
  template <class E, class Engine>
  static std::size_t write(const PrefixCache<E, Engine>& prefixes, const HeadPlan<E>& plan, ByteSink& sink,
                           std::string_view tag) {
    // Texts stay as they are while they are written; prefixes may be found meanwhile.
    const std::shared_lock lock{prefixes.mutex_};
    const auto texts = prefixes.texts_of(plan);
    return write_texts(plan, texts.get(), prefixes.cache_options_, sink, tag);
  }
  template <class E, class Engine>
  static std::size_t write(const PrefixCache<E, Engine>& prefixes, const std::filesystem::path& folder,
                           std::string_view tag) {
    const std::shared_lock lock{prefixes.mutex_};
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    require<StorageError>(std::filesystem::is_directory(folder, error), folder.string(),
                          ": is not a folder and cannot be made one");
    std::size_t count = 0;
    std::exception_ptr failure;
    for (const auto& texts : prefixes.texts_) {
      KVPOLICY_TRY {
        // Whoever may put a link into the folder may not choose a file of ours to be overwritten.
        NewFile file{file_of(folder, texts->plan), NewFileAccess::owner, NewFileLinks::replace};
        const std::size_t written = write_texts(texts->plan, texts.get(), prefixes.cache_options_, file, tag);
        file.replace();
        count += written;
      }
      KVPOLICY_CATCH_ALL {  // the other plans' files may be written all the same
        if (failure == nullptr) failure = std::current_exception();
      }
    }
    if (failure != nullptr) std::rethrow_exception(failure);
    return count;
  }

  template <class E, class Engine>
  static std::size_t read(PrefixCache<E, Engine>& prefixes, const HeadPlan<E>& plan, std::istream& stream,
                          std::string name, std::string_view tag, bool alone) {
    auto loaded =
        read_texts(KvCache<E, Engine>{plan, prefixes.cache_options_}, stream, std::move(name), tag, alone);
    std::vector<const std::vector<Token>*> kept;
    kept.reserve(loaded.size());
    KVPOLICY_TRY {
      for (auto& [tokens, cache] : loaded) {
        if (prefixes.adopt(std::move(cache), tokens)) kept.push_back(&tokens);
      }
    }
    KVPOLICY_CATCH_ALL {
      for (const std::vector<Token>* tokens : kept) prefixes.take_back(plan, *tokens);
      KVPOLICY_RETHROW;
    }
    return kept.size();
  }
  template <class E, class Engine>
  static std::size_t read(PrefixCache<E, Engine>& prefixes, const HeadPlan<E>& plan,
                          const std::filesystem::path& folder, std::string_view tag) {
    const std::filesystem::path path = file_of(folder, plan);
    std::error_code error;
    if (!std::filesystem::exists(path, error) && !error) return 0;
    require_regular_file<StorageError>(path);
    std::ifstream file{path, std::ios::binary};
    require<StorageError>(file.good(), path.string(), ": cannot be opened");
    return read(prefixes, plan, file, path.string(), tag, /*alone=*/true);
  }

  template <class E>
  [[nodiscard]] static std::filesystem::path file_of(const std::filesystem::path& folder,
                                                     const HeadPlan<E>& plan) {
    SavedCache::require_savable(plan);
    constexpr std::string_view digits = "0123456789abcdef";
    std::string name;
    for (std::uint64_t rest = SavedCache::digest_of(plan); name.size() < 16; rest /= 16)
      name += digits[rest % 16];
    return folder / (name + ".prefixes");
  }

 private:
  using Token = std::int32_t;
  template <class Cache>
  struct Loaded {
    std::vector<Token> tokens;
    Cache cache;
  };

  // A file of one cache is none of prefixes.
  [[nodiscard]] static std::string own_tag(std::string_view tag) { return message("prefixes: ", tag); }

  // `texts` is null if there is no prefix under the plan.
  template <class Texts, class E>
  static std::size_t write_texts(const HeadPlan<E>& plan, const Texts* texts, const CacheOptions& options,
                                 ByteSink& sink, std::string_view tag) {
    constexpr std::size_t most = max_tag_bytes - std::string_view{"prefixes: "}.size();
    require(tag.size() <= most, "save: the tag has ", tag.size(), " bytes, must have at most ", most);
    // The least recently used one comes first, so that it is again when all are loaded.
    std::vector<std::pair<std::size_t, const typename Texts::Node*>> nodes;
    if (texts != nullptr) {
      texts->tree.for_each([&](const auto& node) { nodes.emplace_back(node.value->last_use.load(), &node); });
    }
    std::ranges::sort(nodes);

    RecordWriter records{sink};
    SavingArchive<RecordWriter> archive{records};
    SavedCache::write_text(archive, own_tag(tag));
    SavedCache::describe(archive, plan);
    archive(options.page_rows, nodes.size());
    PageSaver pages;
    archive.share_pages(pages);
    for (const auto& [last_use, node] : nodes) {
      const std::vector<Token> tokens = node->tokens();
      archive(tokens.size());
      archive.bytes(std::as_bytes(std::span{tokens}));
      SavedCache::write_rows(archive, *node->value->cache);
    }
    records.finish();
    return nodes.size();
  }

  template <class Cache>
  [[nodiscard]] static std::vector<Loaded<Cache>> read_texts(const Cache& empty, std::istream& stream,
                                                             std::string name, std::string_view tag,
                                                             bool alone) {
    RecordReader records{stream, std::move(name)};
    LoadingArchive archive{records};
    SavedCache::check_tag(archive, own_tag(tag), records.name());
    SavedCache::compare(archive, empty.plan(), records.name());
    std::size_t page_rows = 0;
    std::size_t count = 0;
    archive(page_rows, count);
    require<FormatError>(page_rows == empty.options().page_rows, records.name(), ": has pages of ", page_rows,
                         " rows, must have pages of ", empty.options().page_rows,
                         " as the options of the PrefixCache say");
    std::vector<Loaded<Cache>> all;
    PageLoader pages{CacheLayers::pool_of(empty)};
    archive.share_pages(pages);
    for (std::size_t i = 0; i < count; ++i) {
      Loaded<Cache> one{read_tokens(archive, records.name()), empty.fork()};
      auto rows = SavedCache::read_rows(archive, empty, records.name());
      require<FormatError>(rows.layers.front().tokens == one.tokens.size(), records.name(), ": prefix ", i,
                           " has read ", rows.layers.front().tokens, " tokens, must have read its ",
                           one.tokens.size());
      rows.move_to(one.cache);
      all.push_back(std::move(one));
    }
    records.finish(alone);
    return all;
  }

  [[nodiscard]] static std::vector<Token> read_tokens(LoadingArchive& archive, const std::string& name) {
    std::size_t size = 0;
    archive(size);
    require<FormatError>(size > 0 && size <= max_text_tokens, name, ": has a prefix of ", size,
                         " tokens, must be 1 to ", max_text_tokens);
    std::vector<Token> tokens;
    constexpr std::size_t piece = 4096;  // memory is allocated as bytes arrive
    while (tokens.size() < size) {
      const std::size_t from = tokens.size();
      tokens.resize(from + std::min(piece, size - from));
      archive.bytes(std::as_writable_bytes(std::span{tokens}.subspan(from)));
    }
    return tokens;
  }
};

/// Writes all prefixes into a folder, which is made if it is not there, and returns their number. Each file is replaced
/// as a whole (see `save` of a cache), so after a crash each has either its old or its new contents. Files of plans of
/// which no prefix is left stay. `tag`: as in `save` of a cache; name the model and its tokenizer. Prefixes may be
/// found meanwhile, but none be kept. A link in the place of a file is replaced, not followed.
/// @throws ConfigError for a policy that cannot be saved or a tag beyond 64 KiB; StorageError if a file cannot
/// be written, or slow memory not be read: the first error, after the files of all other plans were written
template <class E, class Engine>
std::size_t save(const PrefixCache<E, Engine>& prefixes, const std::filesystem::path& folder,
                 std::string_view tag = {}) {
  return SavedPrefixes::write(prefixes, folder, tag);
}
/// The prefixes of one plan, to a stream.
template <class E, class Engine>
std::size_t save(const PrefixCache<E, Engine>& prefixes, const HeadPlan<E>& plan, std::ostream& stream,
                 std::string_view tag = {}) {
  SavedCache::require_savable(plan);
  StreamSink sink{stream};
  return SavedPrefixes::write(prefixes, plan, sink, tag);
}

/// The file of this plan's prefixes in a folder, whether it is there or not.
/// @throws ConfigError for a policy that cannot be saved
template <class E>
[[nodiscard]] std::filesystem::path saved_prefixes_path(const HeadPlan<E>& plan,
                                                        const std::filesystem::path& folder) {
  return SavedPrefixes::file_of(folder, plan);
}

/// Keeps what was saved under this plan, and returns how many prefixes are new; 0 if the folder has nothing for
/// the plan. Of prefixes that do not fit into `max_bytes` the most recently used stay. Rows that went to slow memory
/// are not shared there.
/// @throws FormatError if the file was written for another plan, tag or page size, or is damaged; CapacityError
/// if max_tokens is too small; StorageError; std::bad_alloc. No prefix of the file is kept then.
template <class E, class Engine>
std::size_t load(PrefixCache<E, Engine>& prefixes, const HeadPlan<E>& plan,
                 const std::filesystem::path& folder, std::string_view tag = {}) {
  return SavedPrefixes::read(prefixes, plan, folder, tag);
}
/// The same from a stream, which then stands right after them.
template <class E, class Engine>
std::size_t load(PrefixCache<E, Engine>& prefixes, const HeadPlan<E>& plan, std::istream& stream,
                 std::string_view tag = {}) {
  SavedCache::require_savable(plan);
  return SavedPrefixes::read(prefixes, plan, stream, "saved prefixes", tag, /*alone=*/false);
}

}  // namespace kvpolicy
