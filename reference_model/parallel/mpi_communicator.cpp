// SPDX-License-Identifier: Apache-2.0
#include <reference_model/parallel/mpi_communicator.hpp>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <mpi.h>

#include <reference_model/parallel/waiting.hpp>

namespace kvpolicy::reference {

struct MpiCommunicator::Handles {
  MPI_Comm world = MPI_COMM_NULL;
  bool started = false;
  bool failed = false;  // a call did not end, and may still write to `received`
  // What is sent and received, so that a call which does not end has memory to write to.
  std::vector<float> sent, received;
  std::vector<std::byte> sent_bytes, received_bytes;
  std::vector<MPI_Request> requests;  // of the call in progress
  std::vector<MPI_Status> statuses;
};

namespace {

std::string text_of(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  return {text.data(), static_cast<std::size_t>(length)};
}

void check(int code, const char* what) {
  if (code != MPI_SUCCESS) fail<CommunicationError>("MPI: ", what, ": ", text_of(code));
}

// Tags of the roll call: a rank asks the others whether they wait as well, and those that do say so.
constexpr int ask_tag = 1;
constexpr int here_tag = 2;
constexpr int nothing = 0;  // what the messages hold; it outlives them

int count_of(std::size_t numbers) {
  require<CommunicationError>(numbers <= INT_MAX, "MPI: a message of ", numbers, " numbers, at most ",
                              INT_MAX, " are possible; use shorter chunks");
  return static_cast<int>(numbers);
}

void send(int to, int tag, MPI_Comm world) {
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Isend(&nothing, 1, MPI_INT, to, tag, world, &request) == MPI_SUCCESS) MPI_Request_free(&request);
}

}  // namespace

MpiCommunicator::MpiCommunicator(std::chrono::milliseconds timeout)
    : handles_{std::make_unique<Handles>()}, timeout_{timeout}, exceptions_{std::uncaught_exceptions()} {
  require<CommunicationError>(timeout.count() >= 1 && timeout <= std::chrono::hours{24},
                              "MPI: the timeout is ", timeout.count(), " ms, must be from 1 to a day");
  int initialised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  int provided = MPI_THREAD_SERIALIZED;
  if (initialised == 0) {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
    handles_->started = true;
  } else {
    check(MPI_Query_thread(&provided), "MPI_Query_thread");
  }
  require<CommunicationError>(
      provided >= MPI_THREAD_SERIALIZED,
      "MPI: calls from one thread after another are not supported, must be (MPI_THREAD_SERIALIZED)");
  check(MPI_Comm_dup(MPI_COMM_WORLD, &handles_->world), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(handles_->world, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  int rank = 0;
  int size = 1;
  check(MPI_Comm_rank(handles_->world, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(handles_->world, &size), "MPI_Comm_size");
  rank_ = static_cast<std::size_t>(rank);
  size_ = static_cast<std::size_t>(size);
}

MpiCommunicator::~MpiCommunicator() {
  if (handles_->failed || std::uncaught_exceptions() > exceptions_) {
    // MPI's goodbye would wait for the others here. Whoever ends without it ends them.
    static_cast<void>(handles_.release());
    return;
  }
  MPI_Comm_free(&handles_->world);
  if (handles_->started) MPI_Finalize();
}

void MpiCommunicator::end_all() {
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

template <class Start>
void MpiCommunicator::complete(const char* what, std::size_t count, const char* unit, Start start) {
  require<CommunicationError>(!handles_->failed, "rank ", rank_, " of ", size_,
                              ": an earlier call did not come together, so no other can");
  handles_->failed = true;  // until it has
  std::vector<MPI_Request>& requests = handles_->requests;
  requests.clear();
  start([&](auto begin) {
    requests.push_back(MPI_REQUEST_NULL);
    check(begin(&requests.back()), what);
  });
  handles_->statuses.resize(requests.size());
  for (Waiting waiting{timeout_};;) {
    int done = 0;
    check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, handles_->statuses.data()),
          what);
    if (done != 0) break;
    const bool in_time = waiting.again();
    if (waiting.is_long()) answer();
    if (in_time) continue;
    fail<CommunicationError>("rank ", rank_, " of ", size_, ": ", what, " of ", count, unit,
                             " did not come together in ", timeout_.count(), " ms: ", call_the_roll());
  }
  handles_->failed = false;
}

// Tells whoever has asked that this rank waits.
void MpiCommunicator::answer() {
  for (;;) {
    int asked = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, ask_tag, handles_->world, &asked, &status) != MPI_SUCCESS || asked == 0)
      return;
    int number = 0;
    MPI_Recv(&number, 1, MPI_INT, status.MPI_SOURCE, ask_tag, handles_->world, MPI_STATUS_IGNORE);
    send(status.MPI_SOURCE, here_tag, handles_->world);
  }
}

// Says who does not answer.
std::string MpiCommunicator::call_the_roll() {
  std::vector<bool> here(size_, false);
  here[rank_] = true;
  for (std::size_t rank = 0; rank < size_; ++rank) {
    if (rank != rank_) send(static_cast<int>(rank), ask_tag, handles_->world);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds{3};
  while (std::chrono::steady_clock::now() < deadline && !std::ranges::all_of(here, std::identity{})) {
    answer();
    int came = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, here_tag, handles_->world, &came, &status) != MPI_SUCCESS) break;
    if (came == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds{200});
      continue;
    }
    int number = 0;
    MPI_Recv(&number, 1, MPI_INT, status.MPI_SOURCE, here_tag, handles_->world, MPI_STATUS_IGNORE);
    here[static_cast<std::size_t>(status.MPI_SOURCE)] = true;
  }
  std::string missing;
  for (std::size_t rank = 0; rank < size_; ++rank) {
    if (!here[rank]) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (missing.empty()) return "all ranks wait, in calls that are not the same";
  const bool is_one = missing.find(',') == std::string::npos;
  return (is_one ? "rank " : "ranks ") + missing + (is_one ? " does not answer" : " do not answer");
}

void MpiCommunicator::sum(std::span<float> numbers) {
  const int count = count_of(numbers.size());
  handles_->sent.assign(numbers.begin(), numbers.end());
  handles_->received.resize(numbers.size());
  complete("a sum", numbers.size(), " numbers", [&](auto add) {
    add([&](MPI_Request* request) {
      return MPI_Iallreduce(handles_->sent.data(), handles_->received.data(), count, MPI_FLOAT, MPI_SUM,
                            handles_->world, request);
    });
  });
  std::ranges::copy(handles_->received, numbers.begin());
}

void MpiCommunicator::gather(std::span<const float> own, std::span<float> all) {
  require<CommunicationError>(all.size() == own.size() * size_, "MPI: room for ", all.size(), " numbers, ",
                              size_, " ranks send ", own.size(), " each");
  const int count = count_of(own.size());
  handles_->sent.assign(own.begin(), own.end());
  handles_->received.resize(all.size());
  complete("a gathering", own.size(), " numbers", [&](auto add) {
    add([&](MPI_Request* request) {
      return MPI_Iallgather(handles_->sent.data(), count, MPI_FLOAT, handles_->received.data(), count,
                            MPI_FLOAT, handles_->world, request);
    });
  });
  std::ranges::copy(handles_->received, all.begin());
}

void MpiCommunicator::exchange(std::span<const Outgoing> sent, std::span<const Incoming> received) {
  check_messages(sent, received);
  std::vector<std::byte>& out = handles_->sent_bytes;
  std::vector<std::byte>& in = handles_->received_bytes;
  out.clear();
  for (const Outgoing& message : sent) out.insert(out.end(), message.bytes.begin(), message.bytes.end());
  std::size_t coming = 0;
  for (const Incoming& message : received) coming += message.bytes.size();
  in.resize(coming);
  // MPI counts in int: longer messages go in pieces.
  std::vector<int> lengths;
  const auto for_each_piece = [](std::size_t size, auto call) {
    constexpr std::size_t most = std::size_t{1} << 30;
    for (std::size_t first = 0; first < size || first == 0; first += most) {
      call(first, static_cast<int>(std::min(most, size - first)));
    }
  };
  complete("an exchange", out.size() + in.size(), " bytes", [&](auto add) {
    std::byte* to = in.data();
    for (const Incoming& message : received) {
      for_each_piece(message.bytes.size(), [&](std::size_t first, int length) {
        lengths.push_back(length);
        add([&](MPI_Request* request) {
          return MPI_Irecv(to + first, length, MPI_BYTE, static_cast<int>(message.rank), 0, handles_->world,
                           request);
        });
      });
      to += message.bytes.size();
    }
    const std::byte* from = out.data();
    for (const Outgoing& message : sent) {
      for_each_piece(message.bytes.size(), [&](std::size_t first, int length) {
        add([&](MPI_Request* request) {
          return MPI_Isend(from + first, length, MPI_BYTE, static_cast<int>(message.rank), 0, handles_->world,
                           request);
        });
      });
      from += message.bytes.size();
    }
  });
  // A longer message than there is room for is an error of MPI's own.
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    int length = 0;
    check(MPI_Get_count(&handles_->statuses[i], MPI_BYTE, &length), "MPI_Get_count");
    require<CommunicationError>(length == lengths[i], "MPI: a message of ", length, " bytes, expected ",
                                lengths[i], ": ranks make different calls");
  }
  const std::byte* from = in.data();
  for (const Incoming& message : received) {
    std::copy_n(from, message.bytes.size(), message.bytes.begin());
    from += message.bytes.size();
  }
}

}  // namespace kvpolicy::reference
