// SPDX-License-Identifier: Apache-2.0
//
// A draft whose type is chosen at run time, so that a decoder is compiled once for all drafts. A
// program that knows its draft gives it to SpeculativeDecoder itself and pays no virtual call.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include <kvpolicy/speculation/draft.hpp>

#include "stopwatch.hpp"

namespace kvpolicy::tools {

/// Calls of a draft, the draft tokens that it proposed and the seconds that it took, with those of
/// drafts inside it.
struct DraftWork {
  std::size_t calls = 0;
  std::size_t guesses = 0;
  double seconds = 0.0;
};

/// A Draft (concept of the library). Copies share one draft, so a caller can keep a copy to read
/// `work()`.
class AnyDraft {
 public:
  template <Draft D>
  explicit AnyDraft(std::shared_ptr<D> draft) : held_{std::make_shared<Held<D>>(std::move(draft))} {}

  [[nodiscard]] std::size_t vocabulary() const { return held_->vocabulary(); }
  void refresh_selection() { held_->refresh_selection(); }
  void propose(std::span<const int> text, std::size_t most, const SamplingOptions& sampling, Random& random,
               DraftTokens& guesses) {
    const Stopwatch watch;
    held_->propose(text, most, sampling, random, guesses);
    held_->work.seconds += watch.seconds();
    held_->work.guesses += guesses.size();
    ++held_->work.calls;
  }

  [[nodiscard]] const DraftWork& work() const { return held_->work; }

 private:
  struct Base {
    Base() = default;
    Base(const Base&) = delete;
    Base& operator=(const Base&) = delete;
    virtual ~Base() = default;
    [[nodiscard]] virtual std::size_t vocabulary() const = 0;
    virtual void refresh_selection() = 0;
    virtual void propose(std::span<const int> text, std::size_t most, const SamplingOptions& sampling,
                         Random& random, DraftTokens& guesses) = 0;
    DraftWork work;
  };
  template <class D>
  struct Held final : Base {
    explicit Held(std::shared_ptr<D> held) : draft{std::move(held)} {}
    [[nodiscard]] std::size_t vocabulary() const override { return draft->vocabulary(); }
    void refresh_selection() override { kvpolicy::refresh_selection(*draft); }
    void propose(std::span<const int> text, std::size_t most, const SamplingOptions& sampling, Random& random,
                 DraftTokens& guesses) override {
      draft->propose(text, most, sampling, random, guesses);
    }
    std::shared_ptr<D> draft;
  };

  std::shared_ptr<Base> held_;
};
static_assert(Draft<AnyDraft>);

}  // namespace kvpolicy::tools
