// SPDX-License-Identifier: Apache-2.0
//
// One step of those that run: which tokens the model reads, and what becomes of what it says.
#include <algorithm>
#include <cstddef>
#include <exception>
#include <new>
#include <span>
#include <utility>

#include <reference_model/parallel/communicator.hpp>

#include "serve/scheduler.hpp"
#include "serve/sequence.hpp"

namespace kvpolicy::serve {

void Scheduler::read_and_write() {
  std::vector<TextStep> calls;
  std::vector<std::pair<Sequence*, std::size_t>> called;  // and how many tokens it reads
  const auto add = [&](Sequence& sequence, std::span<const int> tokens, bool wants_logits) {
    calls.push_back({sequence.id, tokens, wants_logits, sequence.needs.selected_reads && !sequence.reads()});
    called.emplace_back(&sequence, tokens.size());
  };
  for (auto& one : running_) {
    if (!one->reads()) add(*one, std::span<const int>{one->written}.last(1), true);
  }
  // A prompt is cut where it would be cut alone: heads that quantise read the rows of a piece before they do so, and an
  // answer must not depend on who else is served. So a step has whole pieces, as many as it has tokens for. Every
  // other step begins with the prompt that came first, so that it is soon answered; in those between, the others take
  // turns, so that a long one does not keep short ones waiting.
  std::vector<Sequence*> readers;
  for (const auto& one : running_) {
    if (one->reads()) readers.push_back(one.get());
  }
  std::ranges::sort(readers, {}, &Sequence::id);
  if (readers.size() > 1) {
    const auto others = readers.begin() + 1;
    const std::size_t turn = next_reader_ % (readers.size() - 1);
    std::rotate(others, others + static_cast<std::ptrdiff_t>(turn), readers.end());
    first_waits_ = !first_waits_;
    if (first_waits_) {
      std::rotate(readers.begin(), others, readers.end());
      ++next_reader_;
    }
  }
  std::size_t left = options_.step_tokens;
  for (Sequence* one : readers) {
    const std::size_t from = rows_.tokens(one->id);
    const std::size_t end = one->piece_end(from, options_.step_tokens, options_.mark_every);
    if (end - from > left) continue;
    add(*one, std::span<const int>{one->request.prompt}.subspan(from, end - from),
        end == one->request.prompt.size());
    left -= end - from;
  }
  if (calls.empty()) return;
  ++counters_.steps;
  std::vector<reference::BatchedRead> results;
  try {
    results = rows_.read(calls);
  } catch (const reference::CommunicationError&) {
    throw;
  } catch (const std::exception& error) {
    for (auto& [sequence, tokens] : called) end(*sequence, FinishReason::failed, error.what());
    return;
  }
  for (std::size_t i = 0; i < called.size(); ++i) {
    Sequence& sequence = *called[i].first;
    try {
      if (results[i].error != nullptr) std::rethrow_exception(results[i].error);
      take_result(sequence, called[i].second, results[i]);
    } catch (const reference::CommunicationError&) {
      throw;
    } catch (const std::bad_alloc&) {
      end(sequence, FinishReason::failed, "the server ran out of memory");
    } catch (const std::exception& error) {
      end(sequence, FinishReason::failed, error.what());
    }
  }
}

void Scheduler::take_result(Sequence& sequence, std::size_t tokens, const reference::BatchedRead& read) {
  if (sequence.reads()) {
    const std::size_t now_read = rows_.tokens(sequence.id);
    counters_.prompt_tokens += tokens;
    if (sequence.is_mark(now_read, options_.mark_every)) keep_prefix(sequence);
    if (now_read < sequence.request.prompt.size()) return;
    counters_.cached_tokens += sequence.cached;
    if (sequence.needs.compress) {
      rows_.compress(sequence.id);
      ++changes_;
    }
  }
  write(sequence, sequence.sampler.next(read.logits));
}

void Scheduler::write(Sequence& sequence, int token) {
  const double time = now();
  if (sequence.reads()) {
    counters_.first_token_seconds += time - sequence.came;
    ++counters_.first_tokens;
  } else {
    counters_.between_seconds += time - sequence.last_token;
    ++counters_.betweens;
  }
  sequence.last_token = time;
  const bool is_end = model_.is_end(token);
  bool goes_on = !is_end;
  if (!is_end) {
    sequence.written.push_back(token);
    ++sequence.slice;
    ++counters_.new_tokens;
    goes_on = sequence.request.on_token(token);
  }
  if (goes_on && sequence.written.size() < sequence.request.max_new) return;
  if (!sequence.needs.compress) keep_prefix(sequence);
  end(sequence, goes_on ? FinishReason::length : FinishReason::stop);
}

void Scheduler::keep_prefix(const Sequence& sequence) {
  if (rows_.keep(sequence.id)) ++changes_;
}

}  // namespace kvpolicy::serve
