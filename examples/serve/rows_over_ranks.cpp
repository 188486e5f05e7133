// SPDX-License-Identifier: Apache-2.0
#include "serve/rows_over_ranks.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/plan_json.hpp>
#include <kvpolicy/state/archive.hpp>

namespace kvpolicy::serve {

using reference::CommunicationError;

namespace {

enum class Call : std::uint8_t {
  stop,
  tick,
  plan,
  begin,
  move_out,
  bring_back,
  end,
  read,
  compress,
  keep,
  make_room,
  room,
  save
};
// What ranks say to each other, and how: ranks of programs that differ in it do not work together.
constexpr std::uint64_t protocol = 1;
// Plans that the other ranks remember.
constexpr std::size_t most_plans = 64;
constexpr std::chrono::milliseconds longest_silence{500};

}  // namespace

// One call in bytes.
class RowsOverRanks::Words {
 public:
  explicit Words(Call call) { add(call); }
  template <class T>
  Words& add(const T& value)
    requires std::is_trivially_copyable_v<T>
  {
    return add_bytes(std::as_bytes(std::span{&value, 1}));
  }
  // With their number.
  template <class T>
  Words& add_list(std::span<const T> values) {
    add(std::uint64_t{values.size()});
    return add_bytes(std::as_bytes(values));
  }
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  Words& add_bytes(std::span<const std::byte> bytes) {
    const std::size_t at = bytes_.size();
    bytes_.resize(at + bytes.size());
    if (!bytes.empty()) std::memcpy(bytes_.data() + at, bytes.data(), bytes.size());
    return *this;
  }
  std::vector<std::byte> bytes_;
};

namespace {

class Reader {
 public:
  explicit Reader(std::vector<std::byte> bytes) : bytes_{std::move(bytes)} {}
  template <class T>
  T take() {
    T value;
    copy(&value, sizeof value);
    return value;
  }
  template <class T>
  std::vector<T> take_list() {
    const auto size = take<std::uint64_t>();
    require<CommunicationError>(size <= (bytes_.size() - at_) / sizeof(T), "server: rank 0 says a list of ",
                                size, " that does not come");
    std::vector<T> values(static_cast<std::size_t>(size));
    copy(values.data(), values.size() * sizeof(T));
    return values;
  }

 private:
  void copy(void* to, std::size_t size) {
    require<CommunicationError>(size <= bytes_.size() - at_, "server: what rank 0 says ends too soon");
    if (size > 0) std::memcpy(to, bytes_.data() + at_, size);
    at_ += size;
  }
  std::vector<std::byte> bytes_;
  std::size_t at_ = 0;
};

// Every rank, before rank 0 says anything.
void require_same_options(reference::Communicator& ranks, const RowsOptions& options) {
  require_same(
      ranks, "options of the server",
      digest(protocol, options.memory, options.swap_memory, options.page_rows,
             options.bring_prefixes_back != nullptr, options.save_prefixes != nullptr, sizeof(std::size_t)));
}

// Makes the calls of rank 0, and remembers the plans that it has said.
class Follower {
 public:
  Follower(LocalRows& rows) : rows_{rows}, plans_(most_plans) {}

  // False: rank 0 stops.
  bool make(Reader said) {
    const auto call = said.take<Call>();
    switch (call) {
      case Call::stop: return false;
      case Call::tick: return true;
      case Call::make_room: rows_.make_room(); return true;
      case Call::room: static_cast<void>(rows_.room()); return true;
      case Call::save: save(); return true;
      case Call::plan: learn(said); return true;
      case Call::begin: begin(said); return true;
      case Call::read: read(said); return true;
      case Call::move_out:
      case Call::bring_back: move(call, said.take<std::uint64_t>()); return true;
      case Call::end: rows_.end(said.take<std::uint64_t>()); return true;
      case Call::keep: rows_.keep(said.take<std::uint64_t>()); return true;
      case Call::compress: try { rows_.compress(said.take<std::uint64_t>());
        } catch (const std::bad_alloc&) {
          // so says rank 0's, which ends the text
        }
        return true;
    }
    fail<CommunicationError>("server: rank 0 says a call ", static_cast<int>(call), " that is not known");
  }

 private:
  void learn(Reader& said) {
    const auto number = said.take<std::uint64_t>();
    const auto wanted = said.take<std::uint64_t>();
    const auto text = said.take_list<char>();
    auto plan = std::make_shared<const Plan>(
        io::parse_plan<bfloat16>(std::string_view{text.data(), text.size()}, "rank 0's plan"));
    require<CommunicationError>(SavedCache::digest_of(*plan) == wanted && number < plans_.size(),
                                "server: a plan that rank 0 says is another here");
    plans_[static_cast<std::size_t>(number)] = std::move(plan);
  }
  void begin(Reader& said) {
    NewText text;
    text.id = said.take<std::uint64_t>();
    const auto number = said.take<std::uint64_t>();
    require<CommunicationError>(number < plans_.size() && plans_[number] != nullptr,
                                "server: rank 0 says a plan ", number, " that is not known");
    text.plan = plans_[static_cast<std::size_t>(number)];
    text.max_new = static_cast<std::size_t>(said.take<std::uint64_t>());
    const auto prompt = said.take_list<int>();
    text.prompt = prompt;
    rows_.begin(text);
  }
  void move(Call call, std::uint64_t id) {
    try {
      static_cast<void>(call == Call::move_out ? rows_.move_out(id) : rows_.bring_back(id));
    } catch (const StorageError&) {
      // so says rank 0's, which ends the text
    }
  }
  void read(Reader& said) {
    const auto count = said.take<std::uint64_t>();
    std::vector<std::vector<int>> tokens;
    std::vector<TextStep> steps;
    for (std::uint64_t i = 0; i < count; ++i) {
      TextStep step;
      step.id = said.take<std::uint64_t>();
      step.wants_logits = said.take<bool>();
      step.selects = said.take<bool>();
      tokens.push_back(said.take_list<int>());
      step.tokens = tokens.back();
      steps.push_back(step);
    }
    try {
      static_cast<void>(rows_.read(steps));
    } catch (const CommunicationError&) {
      throw;
    } catch (const Error&) {
      // What fails on one rank fails on all, and rank 0 ends the texts.
    }
  }
  void save() {
    try {
      static_cast<void>(rows_.save());
    } catch (const Error& error) {
      rows_.options().tell(message("not saved: ", error.what()));
    }
  }

  LocalRows& rows_;
  std::vector<std::shared_ptr<const Plan>> plans_;
};

}  // namespace

void follow(reference::Communicator& ranks, LocalRows& rows) {
  require_same_options(ranks, rows.options());
  Follower follower{rows};
  while (follower.make(Reader{broadcast(ranks, 0, {})})) {
  }
}

RowsOverRanks::RowsOverRanks(reference::Communicator& ranks, LocalRows& own, const Shards& shards)
    : ranks_{ranks},
      own_{own},
      shards_{shards},
      plans_(most_plans),
      said_{std::chrono::steady_clock::now()},
      saved_{said_} {
  require_same_options(ranks, own.options());
}

void RowsOverRanks::say(const Words& words) {
  is_broken_ = true;  // until all have heard it
  static_cast<void>(broadcast(ranks_, 0, words.bytes()));
  is_broken_ = false;
  said_ = std::chrono::steady_clock::now();
}

void RowsOverRanks::stop() { say(Words{Call::stop}); }

std::size_t RowsOverRanks::peak_bytes(const Plan& plan, std::size_t prompt, std::size_t max_new) const {
  std::size_t most = 0;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    most = std::max(most, own_.peak_bytes(plan_of_rank(plan, shards_, rank), prompt, max_new));
  }
  return most;
}

// The number by which the others know a plan.
std::uint64_t RowsOverRanks::number_of(const std::shared_ptr<const Plan>& plan) {
  const auto known = std::ranges::find(plans_, plan);
  if (known != plans_.end()) return static_cast<std::uint64_t>(known - plans_.begin());
  const std::size_t number = next_plan_;
  next_plan_ = (next_plan_ + 1) % plans_.size();
  const std::string text = io::format_plan(*plan);
  say(Words{Call::plan}
          .add(std::uint64_t{number})
          .add(std::uint64_t{SavedCache::digest_of(*plan)})
          .add_list(std::span{text}));
  plans_[number] = plan;
  return number;
}

std::optional<std::size_t> RowsOverRanks::begin(const NewText& text) {
  const std::uint64_t plan = number_of(text.plan);
  say(Words{Call::begin}.add(text.id).add(plan).add(std::uint64_t{text.max_new}).add_list(text.prompt));
  return own_.begin(text);
}
bool RowsOverRanks::move_out(std::uint64_t id) {
  say(Words{Call::move_out}.add(id));
  return own_.move_out(id);
}
bool RowsOverRanks::bring_back(std::uint64_t id) {
  say(Words{Call::bring_back}.add(id));
  return own_.bring_back(id);
}
std::size_t RowsOverRanks::end(std::uint64_t id) {
  // Texts are ended also when all is over.
  if (is_broken_) return 0;
  try {
    say(Words{Call::end}.add(id));
    return own_.end(id);
  } catch (const CommunicationError&) {
    is_broken_ = true;
    return 0;
  }
}
std::vector<reference::BatchedRead> RowsOverRanks::read(std::span<const TextStep> steps) {
  Words words{Call::read};
  words.add(std::uint64_t{steps.size()});
  for (const TextStep& step : steps)
    words.add(step.id).add(step.wants_logits).add(step.selects).add_list(step.tokens);
  say(words);
  return own_.read(steps);
}
void RowsOverRanks::compress(std::uint64_t id) {
  say(Words{Call::compress}.add(id));
  own_.compress(id);
}
bool RowsOverRanks::keep(std::uint64_t id) {
  say(Words{Call::keep}.add(id));
  return own_.keep(id);
}
void RowsOverRanks::make_room() {
  say(Words{Call::make_room});
  own_.make_room();
}
void RowsOverRanks::tick() {
  const auto now = std::chrono::steady_clock::now();
  const std::chrono::seconds every = own_.options().save_every;
  if (every.count() > 0 && now - saved_ > every) {
    saved_ = now;
    if (const std::size_t kept = prefixes().statistics().kept; kept != saved_kept_) {
      saved_kept_ = kept;
      try {
        static_cast<void>(save());
      } catch (const Error& error) {
        own_.options().tell(message("not saved: ", error.what()));
      }
    }
  }
  // The others wait no longer than their timeout, also while there is nothing to do.
  if (now - said_ > longest_silence) say(Words{Call::tick});
}
std::size_t RowsOverRanks::save() {
  say(Words{Call::save});
  return own_.save();
}
Room RowsOverRanks::room() {
  say(Words{Call::room});
  return own_.room();
}

}  // namespace kvpolicy::serve
