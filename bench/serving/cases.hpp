// SPDX-License-Identifier: Apache-2.0
//
// The cases: texts alone and together (which verifies), everything queued at once, long texts that share nothing,
// arrivals as in the open, eight equal texts, one prefix for many, and simulated hours.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include "drive.hpp"
#include "report.hpp"
#include "subject.hpp"

namespace kvpolicy::bench {

using PlanPtr = std::shared_ptr<const serve::Plan>;

/// What must be true of every run.
inline void check(Report& report, const std::string& name, const Measured& run) {
  if (run.failed > 0) {
    report.wrong(name, fmt::format("{} requests failed: {}", run.failed, run.error));
  }
  if (run.peak_bytes > run.budget) {
    report.wrong(name, fmt::format("{} bytes were in use, the budget is {}", run.peak_bytes, run.budget));
  }
}

/// A few requests under a budget so small that they wait for each other, against each by itself.
inline void verify(Report& report, const Settings& settings, Subject& subject, const std::string& plan_name) {
  const std::string name = "verify/" + plan_name;
  report.progress().update(0, name);
  const PlanPtr plan = subject.plan(plan_name);
  Traffic small = settings.traffic;
  const std::size_t system = std::min<std::size_t>(settings.smoke ? 320 : 768, small.systems.front());
  small.systems = {system, system / 2 + 96};
  small.own = {.median = 100, .sigma = 0.5, .least = 20, .most = 200};
  small.answer = {.median = 16, .sigma = 0.5, .least = 8, .most = 24};
  const std::vector<DrawnRequest> requests = subject.draw(small, settings.smoke ? 4 : 8);
  constexpr std::size_t step_tokens = 96;
  std::size_t largest = 0;
  const auto each_alone = [&](std::size_t parts) {
    std::vector<std::vector<int>> all;
    for (const DrawnRequest& one : requests) {
      serve::SchedulerOptions options = settings.scheduler(std::size_t{1} << 40);
      options.step_tokens = parts;
      Drive<> drive{subject.served(), options};
      largest = std::max(largest, drive.scheduler().peak_bytes(*plan, one.prompt.size(), one.max_new));
      check(report, name, drive.run(std::span{&one, 1}, plan, plan_name));
      all.push_back(drive.texts().front().tokens);
    }
    return all;
  };
  const auto alike = [](const std::vector<std::vector<int>>& some,
                        const std::vector<std::vector<int>>& others) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < some.size(); ++i) count += some[i] == others[i] ? 1U : 0U;
    return count;
  };
  const std::vector<std::vector<int>> alone = each_alone(step_tokens);
  // What other pieces alone do to a model's last bits, and rarely to its tokens, shows where nobody else runs.
  const std::size_t in_other_parts = alike(alone, each_alone(56));
  serve::SchedulerOptions options = settings.scheduler(3 * largest);
  options.step_tokens = step_tokens;
  options.patience = 0.02;
  options.slice = 4;
  Drive<> drive{subject.served(), options};
  const Measured together = drive.run(requests, plan, plan_name);
  check(report, name, together);
  std::vector<std::vector<int>> written;
  for (const Text& text : drive.texts()) written.push_back(text.tokens);
  const std::size_t equal = alike(alone, written);
  if (2 * equal < requests.size() && equal < in_other_parts) {
    report.wrong(name, fmt::format("only {} of {} texts are as they are alone", equal, requests.size()));
  }
  report.add(name,
             {{"texts", requests.size()},
              {"equal", equal},
              {"equal_alone_in_other_parts", in_other_parts},
              {"moved_out", together.moved_out},
              {"peak_bytes", together.peak_bytes},
              {"budget_bytes", together.budget}},
             fmt::format("{} of {} texts as alone ({} alone, read in other parts), {} moved out, at most "
                         "{:.1f} of {:.1f} MiB",
                         equal, requests.size(), in_other_parts, together.moved_out,
                         mebibytes(together.peak_bytes), mebibytes(together.budget)));
}

/// Runs requests under the budget; arrivals, if any, in seconds.
inline Measured under_budget(Report& report, const Settings& settings, Subject& subject,
                             const std::string& name, const std::string& plan_name, std::size_t budget,
                             const std::vector<DrawnRequest>& requests, const std::vector<double>& arrivals) {
  const PlanPtr plan = subject.plan(plan_name);
  Drive<> drive{subject.served(), settings.scheduler(budget)};
  double told = 0;
  const Measured run = drive.run(requests, plan, plan_name, arrivals, [&](const Drive<>& now_is) {
    if (now_is.now() - told < 0.5) return;
    told = now_is.now();
    const auto ended = static_cast<double>(now_is.texts().size() - now_is.open());
    report.progress().update(
        ended / static_cast<double>(requests.size()),
        fmt::format("{}: {} running, {} open", name, now_is.scheduler().running(), now_is.open()));
  });
  check(report, name, run);
  return run;
}

/// All requests are there at once: how many run together, and what comes out a second.
inline Measured saturate(Report& report, const Settings& settings, Subject& subject,
                         const std::string& plan_name, std::size_t budget) {
  const std::string name = "saturate/" + plan_name;
  const Measured run = under_budget(report, settings, subject, name, plan_name, budget,
                                    subject.draw(settings.traffic, settings.saturate), {});
  report.add(name, json_of(run), line_of(run));
  return run;
}

/// Long texts that share nothing are there at once: here a plan's bytes decide who runs, and what is read in a step.
inline void unshared(Report& report, const Settings& settings, Subject& subject, const std::string& plan_name,
                     std::size_t budget) {
  const std::string name = "unshared/" + plan_name;
  const Measured run = under_budget(report, settings, subject, name, plan_name, budget,
                                    subject.draw(settings.long_texts, settings.unshared), {});
  if (run.refused > 0) {
    report.wrong(name, fmt::format("{} of {} texts are longer than the model or the budget takes; see --own, "
                                   "--own-most and --memory",
                                   run.refused, settings.unshared));
  }
  Json entry{{"traffic", settings.long_texts.json()}};
  entry.update(json_of(run));
  report.add(name, std::move(entry), line_of(run));
}

/// Poisson arrivals that do not wait for answers.
inline void open_loop(Report& report, const Settings& settings, Subject& subject,
                      const std::string& plan_name, std::size_t budget, double rate) {
  const std::string name = fmt::format("open/{}/rate:{:.3g}", plan_name, rate);
  const std::vector<double> arrivals = poisson_arrivals(settings.requests, rate, settings.traffic.seed);
  const Measured run = under_budget(report, settings, subject, name, plan_name, budget,
                                    subject.draw(settings.traffic, settings.requests), arrivals);
  Json entry{{"rate", rate}, {"arrivals_end_at", arrivals.back()}};
  entry.update(json_of(run));
  report.add(name, std::move(entry), line_of(run));
}

/// Eight equal texts, decoded together and one after another, in turn; the prompt is a prefix by then.
inline void batch(Report& report, const Settings& settings, Subject& subject, const std::string& plan_name) {
  constexpr std::size_t texts = 8;
  const std::string name = "batch/" + plan_name;
  const PlanPtr plan = subject.plan(plan_name);
  const std::size_t prompt = settings.smoke ? 100 : 1024;
  const std::size_t tokens = settings.smoke ? 8 : settings.quick ? 32 : 64;
  const std::vector<DrawnRequest> requests(
      texts, DrawnRequest{.prompt = subject.text(prompt, 0), .max_new = tokens});
  // Seconds for a decoded token.
  const auto time = [&](std::size_t at_once) {
    serve::SchedulerOptions options = settings.scheduler(std::size_t{1} << 40);
    options.max_running = at_once;
    Drive<> drive{subject.served(), options};
    DrawnRequest first = requests.front();
    first.max_new = 1;
    check(report, name, drive.run(std::span{&first, 1}, plan, plan_name));
    check(report, name, drive.run(requests, plan, plan_name));
    double seconds = 0;
    std::size_t count = 0;
    if (at_once == 1) {
      for (const Text& text : drive.texts()) {
        if (text.token_times.size() < 2) continue;
        seconds += text.token_times.back() - text.token_times.front();
        count += text.token_times.size() - 1;
      }
    } else {
      // While all of them write.
      double from = 0;
      double to = 1e300;
      for (const Text& text : drive.texts()) {
        if (text.token_times.size() < 2) continue;
        from = std::max(from, text.token_times.front());
        to = std::min(to, text.token_times.back());
      }
      for (const Text& text : drive.texts()) {
        count += static_cast<std::size_t>(
            std::ranges::count_if(text.token_times, [&](double one) { return one > from && one <= to; }));
      }
      seconds = to - from;
    }
    return count == 0 ? 0.0 : seconds / static_cast<double>(count);
  };
  Samples together, each, ratios;
  const std::size_t rounds = settings.smoke ? 1 : settings.quick ? 2 : 5;
  for (std::size_t round = 0; round < rounds; ++round) {
    report.progress().update(static_cast<double>(round) / static_cast<double>(rounds), name);
    const double all = time(texts);
    const double one = time(1);
    if (all <= 0 || one <= 0) return report.wrong(name, "the texts ended at once");
    together.add(all);
    each.add(one);
    ratios.add(one / all);
  }
  report.add(name,
             {{"texts", texts},
              {"prompt", prompt},
              {"tokens", tokens},
              {"rounds", rounds},
              {"tokens_per_second", 1 / together.median()},
              {"tokens_per_second_one_by_one", 1 / each.median()},
              {"speedup", ratios.median()},
              {"speedup_least", ratios.at(0)},
              {"speedup_most", ratios.at(1)}},
             fmt::format("{} texts together {:.1f} tokens/s, one after another {:.1f}: {:.2f} times as many "
                         "({:.2f} to {:.2f})",
                         texts, 1 / together.median(), 1 / each.median(), ratios.median(), ratios.at(0),
                         ratios.at(1)));
}

/// Many requests that begin alike: the time until all have their first token, and what they hold then. The prefix is
/// known after the first request; beside it stand requests that share nothing, and those that come all at once.
inline void prefix(Report& report, const Settings& settings, Subject& subject, const std::string& plan_name) {
  const std::string name = "prefix/" + plan_name;
  const PlanPtr plan = subject.plan(plan_name);
  const std::size_t count = settings.smoke ? 4 : settings.quick ? 8 : 32;
  const std::size_t tail = settings.smoke ? 20 : 96;
  // Long enough for the first ones to be still writing when the last one begins.
  const std::size_t answer = settings.smoke ? 12 : 384;
  const std::size_t context = subject.served().context();
  std::size_t shared = settings.smoke ? 300 : settings.quick ? 2048 : 8192;
  if (context > 0) shared = std::min(shared, context - tail - answer);
  const std::vector<int> opening = subject.text(shared, 0);
  std::vector<DrawnRequest> requests(count);
  for (std::size_t i = 0; i < count; ++i) {
    requests[i] = {.prompt = opening, .system = shared, .max_new = answer};
    const std::vector<int> own = subject.text(tail, 100 + i);
    requests[i].prompt.insert(requests[i].prompt.end(), own.begin(), own.end());
  }
  serve::SchedulerOptions options = settings.scheduler(0);
  options.mark_every = 0;  // one prefix, where the requests name it
  options.step_tokens = std::max<std::size_t>(options.step_tokens, 512);
  options.patience = 1e9;
  options.max_running = count;
  const auto with_budget = [&] {
    // As much as six texts take that keep every row and share nothing, whatever the plan; the short ones of a smoke
    // test take more where their latest rows stay exact beside the others.
    const serve::Plan full = subject.plan_named("full");
    serve::SchedulerOptions own = options;
    own.memory = std::size_t{1} << 40;
    const serve::Scheduler any{subject.served(), own};
    const auto six = [&](const serve::Plan& kept) { return 6 * any.peak_bytes(kept, shared + tail, answer); };
    return std::max(six(full), six(*plan));
  };
  options.memory = with_budget();

  // Shared: one request first, then the others; all write at the same time.
  double seconds = 0;
  std::size_t live = 0, tails = 0, prefix_bytes = 0, running = 0, cached = 0;
  {
    report.progress().update(0, name);
    Drive<> drive{subject.served(), options};
    bool is_due = false;
    const auto watch = [&](const Drive<>& now_is) {
      const auto begun = [](const Text& text) { return !text.tokens.empty(); };
      if (running > 0 || !std::ranges::all_of(now_is.texts(), begun)) return;
      if (!std::exchange(is_due, true)) {
        // The scheduler tells ten times a second how it is: so it does with the next step.
        std::this_thread::sleep_for(std::chrono::milliseconds{120});
        return;
      }
      const serve::Snapshot snapshot = now_is.scheduler().snapshot();
      running = snapshot.requests.size();
      live = snapshot.live_bytes;
      for (const serve::RequestView& one : snapshot.requests) tails += one.bytes - one.shared_bytes;
      for (const PrefixInfo& one : snapshot.prefixes) {
        if (one.tokens == shared) {
          prefix_bytes = one.bytes;
        } else {
          tails += one.freed_bytes;  // the text of the first request
        }
      }
    };
    // One request more comes first, and the others when it has its first token.
    DrawnRequest short_one = requests.front();
    short_one.max_new = 1;
    check(report, name, drive.run(std::span{&short_one, 1}, plan, plan_name));
    const double first_done = drive.texts().front().token_times.front() - drive.texts().front().came;
    const Measured rest = drive.run(requests, plan, plan_name, {}, watch);
    check(report, name, rest);
    cached = rest.cached_tokens;
    double last = 0;
    for (const Text& text : drive.texts()) last = std::max(last, text.token_times.front() - text.came);
    seconds = first_done + last;
  }
  // What differs from the first token on shares nothing.
  const auto until_first_tokens = [&](bool differ) {
    std::vector<DrawnRequest> own = requests;
    for (std::size_t i = 0; i < count; ++i) {
      own[i].max_new = 1;
      if (differ) std::swap(own[i].prompt[0], own[i].prompt[i + 1]);
      if (differ) own[i].prompt[0] = static_cast<int>(32 + i);
    }
    Drive<> drive{subject.served(), options};
    const Measured run = drive.run(own, plan, plan_name, {}, [&](const Drive<>& now_is) {
      report.progress().update(1 - static_cast<double>(now_is.open()) / static_cast<double>(count), name);
    });
    check(report, name, run);
    return run;
  };
  const Measured cold = until_first_tokens(true);
  const Measured at_once = until_first_tokens(false);
  const double ratio = cold.seconds / seconds;
  if (running != count || prefix_bytes == 0) {
    report.wrong(name, fmt::format("{} of {} requests ran together, the prefix has {} bytes", running, count,
                                   prefix_bytes));
  }
  const double prefixes =
      (static_cast<double>(live) - static_cast<double>(tails)) / static_cast<double>(prefix_bytes);
  report.add(name,
             {{"requests", count},
              {"prefix_tokens", shared},
              {"own_tokens", tail},
              {"seconds", seconds},
              {"seconds_cold", cold.seconds},
              {"seconds_all_at_once", at_once.seconds},
              {"times_less", ratio},
              {"found_tokens", cached},
              {"cold_found_tokens", cold.cached_tokens},
              {"at_once_found_tokens", at_once.cached_tokens},
              {"running", running},
              {"live_bytes", live},
              {"tails_bytes", tails},
              {"prefix_bytes", prefix_bytes},
              {"prefixes_in_memory", prefixes}},
             fmt::format("{} requests over {} tokens: first tokens after {:.2f} s, cold {:.2f} s: {:.1f} "
                         "times less; all at once {:.2f} s; "
                         "{} hold {:.1f} MiB = {:.2f} prefixes of {:.1f} + tails of {:.1f}",
                         count, shared, seconds, cold.seconds, ratio, at_once.seconds, running,
                         mebibytes(live), prefixes, mebibytes(prefix_bytes), mebibytes(tails)));
}

/// Bytes of this program in memory now.
[[nodiscard]] inline std::size_t resident_bytes() {
  std::ifstream file{"/proc/self/statm"};
  std::size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

/// Simulated hours of arrivals at a tiny model: whether memory grows. A step takes 50 ms of the simulated time.
inline void hours(Report& report, const Settings& settings, double count) {
  constexpr double rate = 2;
  ShapeSubject subject{ModelShape{2, 2, 2, 16}};
  Traffic traffic = settings.traffic;
  traffic.systems = {128, 256, 512};
  traffic.own = {.median = 64, .sigma = 0.6, .least = 8, .most = 256};
  traffic.answer = {.median = 48, .sigma = 0.7, .least = 4, .most = 200};
  serve::SchedulerOptions options = settings.scheduler(std::size_t{2} << 20);
  options.swap_memory = std::size_t{4} << 20;
  const std::string plan_name = "duo:0.5";
  const PlanPtr plan = subject.plan(plan_name);
  Drive<SimulatedTime> drive{subject.served(), options, SimulatedTime{0.05}};
  const double piece = std::min(1.0, count);
  const auto pieces = static_cast<std::size_t>(std::ceil(count / piece));
  Json samples = Json::array();
  std::size_t requests = 0, tokens = 0, moved_out = 0, most_rss = 0, first_rss = 0, last_rss = 0,
              most_running = 0;
  const auto began = Clock::now();
  for (std::size_t hour = 0; hour < pieces; ++hour) {
    const std::string name = "hours";
    report.progress().update(static_cast<double>(hour) / static_cast<double>(pieces),
                             fmt::format("simulated hour {} of {}", hour + 1, pieces));
    traffic.seed = settings.traffic.seed + hour;
    const auto arrivals_count = static_cast<std::size_t>(std::max(1.0, rate * piece * 3600));
    const std::vector<DrawnRequest> drawn = subject.draw(traffic, arrivals_count);
    const std::vector<double> arrivals = poisson_arrivals(arrivals_count, rate, traffic.seed);
    const Measured run = drive.run(drawn, plan, plan_name, arrivals);
    check(report, name, run);
    const serve::Snapshot idle = drive.scheduler().snapshot();
    if (!idle.requests.empty() || idle.promised_bytes != 0 || idle.swapped_bytes != 0 ||
        idle.live_bytes != idle.prefix_only_bytes || idle.live_bytes > idle.budget) {
      report.wrong(
          name,
          fmt::format(
              "after hour {} nothing runs, {} bytes are in use, {} of them of prefixes, {} moved out, "
              "{} promised",
              hour + 1, idle.live_bytes, idle.prefix_only_bytes, idle.swapped_bytes, idle.promised_bytes));
    }
    requests += run.requests;
    tokens += run.new_tokens + run.prompt_tokens;
    moved_out += run.moved_out;
    most_running = std::max(most_running, run.most_running);
    last_rss = resident_bytes();
    if (hour == pieces / 4) first_rss = last_rss;
    most_rss = std::max(most_rss, last_rss);
    samples.push_back({{"hour", static_cast<double>(hour + 1) * piece},
                       {"requests", run.requests},
                       {"live_bytes", idle.live_bytes},
                       {"prefix_bytes", idle.prefix_only_bytes},
                       {"peak_bytes", run.peak_bytes},
                       {"resident_bytes", last_rss}});
  }
  const double took = seconds_since(began);
  const double growth =
      static_cast<double>(last_rss) / static_cast<double>(std::max<std::size_t>(first_rss, 1));
  report.add("hours",
             {{"hours", count},
              {"rate", rate},
              {"step_seconds", 0.05},
              {"plan", plan_name},
              {"seconds", took},
              {"requests", requests},
              {"tokens", tokens},
              {"sequences_at_once", most_running},
              {"moved_out", moved_out},
              {"budget_bytes", options.memory},
              {"peak_bytes", drive.scheduler().memory().peak_bytes()},
              {"resident_bytes_most", most_rss},
              {"resident_growth", growth},
              {"samples", samples}},
             fmt::format("{:.3g} simulated hours in {:.0f} s: {} requests, {} moved out, at most {:.2f} of "
                         "{:.2f} MiB, process {:.1f} MiB, "
                         "{:.3f} times what it was after a quarter",
                         count, took, requests, moved_out, mebibytes(drive.scheduler().memory().peak_bytes()),
                         mebibytes(options.memory), mebibytes(most_rss), growth));
}

}  // namespace kvpolicy::bench
