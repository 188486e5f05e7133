// SPDX-License-Identifier: Apache-2.0
//
// Serves a model over HTTP, with OpenAI's interface, under a memory budget for its KV caches.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/format.hpp>
#include <kvpolicy/offload/file_resource.hpp>
#include <kvpolicy/state/checksum.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/model_digest.hpp>
#include <reference_model/parallel/shard_parts.hpp>
#include <reference_model/run.hpp>

#include "common/device.hpp"
#include "common/files.hpp"
#include "common/load_arguments.hpp"
#include "common/run_tool.hpp"
#include "common/say.hpp"
#include "common/text_model.hpp"
#include "serve/api.hpp"
#include "serve/join_ranks.hpp"
#include "serve/llama_served.hpp"
#include "serve/local_rows.hpp"
#include "serve/parallel_served.hpp"
#include "serve/prefix_folder.hpp"
#include "serve/rows_over_ranks.hpp"
#include "serve/scheduler.hpp"
#include "serve/server.hpp"
#include "tool_plan.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::tools;

struct Arguments {
  std::string model;
  std::string name;
  std::string plan = "full";
  LoadArguments load;
  std::size_t memory = 1024;       // MiB
  std::size_t swap_memory = 4096;  // MiB
  std::string swap_folder;
  std::string prefixes;
  std::size_t save_every = 300;   // seconds
  std::size_t rank_timeout = 60;  // seconds
  std::size_t threads = 0;
  bool log = false;
  bool demo = false;
  serve::SchedulerOptions scheduler;
  serve::ServerOptions server;
};

constexpr const char* description =
    R"(Serves a model of the Llama family over HTTP with OpenAI's interface: POST /v1/completions and
/v1/chat/completions (streaming too), GET /v1/models, /health, /metrics (Prometheus).

All requests share one memory budget for their KV caches. A request comes in when the most that it may take
is free, so one that was admitted never fails for memory; texts that begin alike share what they read; a
request may name a plan of its own: "kv_plan": "duo:0.5".

Under mpirun each process holds some KV heads of every text, and its part of the weights; rank 0 takes the
requests. --memory is each one's, and a request comes in if the fullest has room for it.)";

std::string footer() {
  return std::string{"Plans (--plan, and \"kv_plan\" in a request):\n"} + plan_help() + R"(
Examples:
  serve --model models/smollm2 --demo
  serve --model models/smollm2 --plan duo+int4:0.5 --memory 256 --port 9000
  serve --model models/smollm2 --prefixes /var/lib/kvpolicy --swap-folder /var/tmp
  mpirun -n 2 --bind-to none serve --model models/smollm2 --threads 4
  curl http://127.0.0.1:8080/v1/completions -d '{"prompt": "The capital of France is", "max_tokens": 8}'
  curl http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello!"}], "kv_plan": "duo:0.5"}')";
}

constexpr std::size_t mebibyte = std::size_t{1} << 20;

// SIGINT and SIGTERM come to one thread, which does what they are for just now, once; at any other time they end the program.
class StopBySignal {
 public:
  StopBySignal() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGINT);
    sigaddset(&signals_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
    std::signal(SIGPIPE, SIG_IGN);
    thread_ = std::thread{[this] { wait(); }};
  }
  ~StopBySignal() {
    is_over_ = true;
    pthread_kill(thread_.native_handle(), SIGTERM);
    thread_.join();
  }
  StopBySignal(const StopBySignal&) = delete;
  StopBySignal& operator=(const StopBySignal&) = delete;

  /// What the next signal is for; null: to end the program.
  void are_for(std::function<void()> what) {
    const std::lock_guard lock{mutex_};
    what_ = std::move(what);
  }
  class Meanwhile {
   public:
    Meanwhile(StopBySignal& signals, std::function<void()> what) : signals_{signals} {
      signals.are_for(std::move(what));
    }
    ~Meanwhile() { signals_.are_for(nullptr); }
    Meanwhile(const Meanwhile&) = delete;
    Meanwhile& operator=(const Meanwhile&) = delete;

   private:
    StopBySignal& signals_;
  };

 private:
  void wait() {
    for (;;) {
      int signal = 0;
      sigwait(&signals_, &signal);
      if (is_over_) return;
      const std::lock_guard lock{mutex_};
      if (!what_) {
        say("serve: ended by a signal");
        end_by(signal);
      }
      std::exchange(what_, nullptr)();
    }
  }
  static void end_by(int signal) {
    std::signal(signal, SIG_DFL);
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, signal);
    pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
    ::raise(signal);
  }

  sigset_t signals_{};
  std::mutex mutex_;
  std::function<void()> what_;
  std::atomic<bool> is_over_ = false;
  std::thread thread_;
};

// What must be the same for saved prefixes to make sense.
std::string tag_of(const Arguments& arguments, const TextModel& model) {
  return fmt::format("{} {:016x}, {} weights, {} activations", arguments.name,
                     reference::digest_of(model.llama()), arguments.load.weights, arguments.load.activations);
}

// The plan by which ranks divide the heads.
serve::Plan dividing_plan(const Arguments& arguments, const TextModel& model) {
  PlanArguments wanted;
  wanted.plan = arguments.plan;
  auto plan = make_plan<bfloat16>(wanted, model.config().shape(), arguments.model);
  reference::limit_windows(plan, model.config());
  return plan;
}

// How long a text of a plan fits into every process's memory by itself.
std::string longest_text(const serve::Plan& plan, std::size_t memory, const Shards* shards) {
  std::size_t tokens = shards == nullptr ? plan.max_context(memory).value_or(0) : max_text_tokens;
  for (std::size_t rank = 0; shards != nullptr && rank < shards->ranks(); ++rank) {
    tokens = std::min(tokens, plan_of_rank(plan, *shards, rank).max_context(memory).value_or(0));
  }
  return tokens < max_text_tokens ? fmt::format("{} tokens of one text", thousands(tokens))
                                  : "one text of any length";
}

std::string what_of(const std::exception_ptr& failed) {
  try {
    std::rethrow_exception(failed);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown error";
  }
}

// Answers requests until a signal comes, and then does `finish`. If connections are left then, it does `leave` and ends the
// program. `shards`: who has which heads, if this is one process of several.
void answer(Arguments& arguments, const TextModel& model, serve::ServedModel& served, serve::Rows& rows,
            const Shards* shards, const std::function<void(const serve::Api&)>& begun,
            const std::function<void()>& finish, const std::function<void()>& leave, StopBySignal& signals) {
  const serve::Api api{model, served, arguments.name, arguments.model, arguments.plan};
  serve::Scheduler scheduler{served, rows, arguments.scheduler};
  begun(api);
  arguments.server.page = arguments.demo;
  serve::Server server{api, scheduler, arguments.server};
  const StopBySignal::Meanwhile meanwhile{signals, [&server] { server.stop(); }};
  const bool is_version_6 = arguments.server.host.find(':') != std::string::npos;
  fmt::print(stderr, "  model      {} under the plan {}\n", arguments.name, arguments.plan);
  if (shards != nullptr)
    fmt::print(stderr, "  processes  {}, each with some heads of every text\n", shards->ranks());
  fmt::print(stderr,
             "  memory     {:MB} for KV caches{}: {}\n"
             "  listening  http://{}:{}{}\n",
             Bytes{arguments.scheduler.memory}, shards != nullptr ? " in each" : "",
             longest_text(*api.default_plan(), arguments.scheduler.memory, shards),
             is_version_6 ? "[" + arguments.server.host + "]" : arguments.server.host, server.port(),
             arguments.demo ? "  (open it in a browser)" : "");
  fmt::print("{}\n", server.port());
  std::fflush(stdout);
  const serve::Stopped stopped = server.run();
  signals.are_for(nullptr);  // a second one does not wait for what is saved
  std::exception_ptr failed = stopped.failed;
  if (failed == nullptr) {
    if (stopped.cut > 0) say(message("  stopped    ", stopped.cut, " requests were cut"));
    try {
      finish();
    } catch (...) {
      failed = std::current_exception();
    }
  }
  if (stopped.has_strays) {
    // Their threads look at what stands above until the program ends.
    if (failed != nullptr) say("serve: " + what_of(failed));
    say("  stopped    connections were cut that did not end by themselves");
    std::fflush(nullptr);
    if (failed == nullptr) leave();
    std::_Exit(failed == nullptr ? 0 : 1);
  }
  if (failed != nullptr) std::rethrow_exception(failed);
}

// One process, or one rank of several, of which the first answers requests and the others follow it.
// `leave`: takes leave of the other processes.
void serve_texts(Arguments& arguments, reference::Communicator* ranks, const std::function<void()>& leave,
                 StopBySignal& signals) {
  const auto model = TextModel::load(arguments.model, arguments.load.options());
  if (arguments.name.empty()) arguments.name = last_part(arguments.model);
  std::optional<serve::LlamaServed> whole;
  std::optional<serve::ParallelServed> part;
  if (ranks == nullptr) {
    whole.emplace(model);
  } else {
    const std::size_t longest = model.config().max_positions;
    part.emplace(model, dividing_plan(arguments, model), longest > 0 ? longest : 4096, *ranks);
  }
  serve::ServedModel& served = whole ? static_cast<serve::ServedModel&>(*whole) : *part;

  serve::SchedulerOptions& options = arguments.scheduler;
  std::optional<offload::FileResource> file;
  if (!arguments.swap_folder.empty()) {
    file.emplace(offload::FileOptions{.folder = arguments.swap_folder,
                                      .max_bytes = arguments.swap_memory * mebibyte + mebibyte});
    options.swap_to = &*file;
  }
  options.memory = arguments.memory * mebibyte;
  options.swap_memory = arguments.swap_memory * mebibyte;
  options.save_every = std::chrono::seconds{arguments.save_every};
  options.tell = [who = part ? fmt::format("rank {}: ", ranks->rank())
                             : std::string{}](const std::string& line) { say("  prefixes   " + who + line); };
  if (arguments.log) options.log = say;
  std::optional<serve::PrefixFolder> folder;
  if (!arguments.prefixes.empty()) {
    std::string tag = tag_of(arguments, model);
    // Another model's server may have the same folder, and the model of this one's name have been another.
    std::filesystem::path place = std::filesystem::path{arguments.prefixes} /
                                  fmt::format("{:016x}", checksum(std::as_bytes(std::span{tag})));
    if (part) {  // each rank has its own heads
      place /= fmt::format("{}-ranks", ranks->size());
      place /= fmt::format("rank-{}", ranks->rank());
      tag += fmt::format(", heads {:016x}", reference::digest_of(part->shards()));
    }
    folder.emplace(place, tag, options.tell);
    options.bring_prefixes_back = [&folder](serve::Prefixes& prefixes, const serve::Plan& plan) {
      return folder->bring_back(prefixes, plan);
    };
    options.save_prefixes = [&folder, &part](serve::Prefixes& prefixes) {
      return part ? folder->save_own(prefixes) : folder->save(prefixes);
    };
    // Ranks save at one time, and must all have the same prefixes.
    if (!part)
      options.take_prefixes_in = [&folder](serve::Prefixes& prefixes) { return folder->take_in(prefixes); };
  }

  serve::LocalRows own{served, options, ranks};
  if (ranks != nullptr && ranks->rank() > 0) {
    // mpirun tells all, and the first tells the others when it is done.
    const StopBySignal::Meanwhile meanwhile{signals, [] {}};
    return follow(*ranks, own);
  }
  std::optional<serve::RowsOverRanks> over;
  if (ranks != nullptr) over.emplace(*ranks, own, part->shards());
  serve::Rows& rows = over ? static_cast<serve::Rows&>(*over) : own;
  const auto begun = [&](const serve::Api& api) {
    if (!folder || over) return;  // ranks load and save all at one time
    folder->bring_back(own.prefixes(), *api.default_plan());
    if (arguments.save_every > 0) folder->save_every(options.save_every, own.prefixes());
  };
  const auto finish = [&] {
    if (folder) {
      folder->stop();
      const std::size_t count = over ? over->save() : own.save();
      say(message("  prefixes   ", count, " saved to ", arguments.prefixes));
    }
    if (over) over->stop();
  };
  answer(arguments, model, served, rows, part ? &part->shards() : nullptr, begun, finish, leave, signals);
}

void run(Arguments& arguments) {
  StopBySignal signals;  // before any thread begins
  set_threads(arguments.threads);
  auto ranks = serve::join_ranks(std::chrono::seconds{arguments.rank_timeout});
  const auto leave = [&ranks] { ranks.reset(); };
  if (ranks == nullptr) return serve_texts(arguments, nullptr, leave, signals);
  try {
    serve_texts(arguments, ranks.get(), leave, signals);
  } catch (const std::exception& error) {
    fmt::print(stderr, "serve: rank {} of {}: {}\n", ranks->rank(), ranks->size(), error.what());
    std::fflush(stderr);
    serve::end_all_ranks();
  }
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  arguments.model = repository_path(shipped_model);
  CLI::App app{description, "serve"};
  app.footer(footer());
  app.get_formatter()->column_width(26);
  app.add_option("--model", arguments.model, "Hugging Face folder or GGUF file of the model")
      ->type_name("DIR")
      ->capture_default_str();
  app.add_option("--name", arguments.name, "Its name in the interface; default: the folder's")
      ->type_name("TEXT");
  app.add_option("--plan", arguments.plan, "Plan of requests that name none")
      ->type_name("PLAN")
      ->capture_default_str();
  app.add_option("--memory", arguments.memory, "MiB for the rows of all KV caches")
      ->type_name("N")
      ->check(whole_number(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--swap-memory", arguments.swap_memory,
                 "MiB for rows of requests that wait; 0: none is moved out")
      ->type_name("N")
      ->check(whole_number(0, 10'000'000))
      ->capture_default_str();
  app.add_option("--swap-folder", arguments.swap_folder,
                 "Folder for a file with those rows, instead of memory")
      ->type_name("DIR");
  app.add_option(
         "--prefixes", arguments.prefixes,
         "Folder in which prefixes are saved, and which servers may share; those of a plan are loaded when "
         "it is first asked for")
      ->type_name("DIR");
  app.add_option("--save-every", arguments.save_every,
                 "Seconds between savings of prefixes, of which a crash loses the latest; 0: at the end only")
      ->type_name("N")
      ->check(whole_number(0, 10'000'000))
      ->capture_default_str();
  add_load_options(app, arguments.load);
  app.add_option("--host", arguments.server.host,
                 "Address to listen on; the default is seen by this machine alone")
      ->type_name("ADDRESS")
      ->capture_default_str();
  app.add_option("--also-known-as", arguments.server.also_known_as,
                 "Names by which clients may call a server that this machine alone sees, for example through "
                 "a proxy")
      ->type_name("NAME");
  app.add_option("--port", arguments.server.port, "Port; 0: any that is free, which goes to stdout")
      ->type_name("N")
      ->check(whole_number(0, 65535))
      ->capture_default_str();
  app.add_option("--step-tokens", arguments.scheduler.step_tokens, "Most tokens of prompts in a step")
      ->type_name("N")
      ->check(whole_number(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--max-running", arguments.scheduler.max_running, "Most requests in a step")
      ->type_name("N")
      ->check(whole_number(1, 100'000))
      ->capture_default_str();
  app.add_option("--max-waiting", arguments.scheduler.max_waiting,
                 "Most requests that wait; others get status 429")
      ->type_name("N")
      ->check(whole_number(0, 1'000'000))
      ->capture_default_str();
  app.add_option("--max-body", arguments.server.max_body, "Most bytes of a request")
      ->type_name("N")
      ->check(whole_number(1, std::uint64_t{1} << 30))
      ->capture_default_str();
  app.add_option("--connections", arguments.server.connections,
                 "Connections that are served at once; 0: --max-running, --max-waiting and 64 more")
      ->type_name("N")
      ->check(whole_number(0, serve::Server::most_connections))
      ->capture_default_str();
  app.add_option("--seconds-to-read", arguments.server.seconds_to_read,
                 "Seconds in which the body of a request must have come")
      ->type_name("N")
      ->check(whole_number(1, 86'400))
      ->capture_default_str();
  app.add_option("--seconds-to-write", arguments.server.seconds_to_write,
                 "Seconds after which a client that takes nothing of its answer is dropped")
      ->type_name("N")
      ->check(whole_number(1, 86'400))
      ->capture_default_str();
  app.add_option("--rank-timeout", arguments.rank_timeout,
                 "Seconds after which processes under mpirun give up one that does not answer")
      ->type_name("N")
      ->check(whole_number(2, 86'400))
      ->capture_default_str();
  app.add_option("--threads", arguments.threads, "Threads of the model; 0: all that OpenMP offers")
      ->type_name("N")
      ->check(whole_number(0, most_threads))
      ->capture_default_str();
  app.add_flag("--log", arguments.log,
               "A line on stderr when a request came, begins, is moved out, and ended");
  app.add_flag("--demo", arguments.demo, "Show what goes on at /");
  return run_tool(app, argc, argv, [&] { run(arguments); });
}
