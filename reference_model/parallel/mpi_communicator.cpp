// SPDX-License-Identifier: Apache-2.0
#include <reference_model/parallel/mpi_communicator.hpp>

#include <array>
#include <climits>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>

#include <mpi.h>

namespace kvpolicy::reference {

struct MpiCommunicator::Handles {
  MPI_Comm world = MPI_COMM_NULL;
  bool started = false;
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

int count_of(std::size_t numbers) {
  require<CommunicationError>(numbers <= INT_MAX, "MPI: a message of ", numbers, " numbers, at most ",
                              INT_MAX, " are possible; use shorter chunks");
  return static_cast<int>(numbers);
}

}  // namespace

MpiCommunicator::MpiCommunicator(std::chrono::milliseconds timeout)
    : handles_{new Handles}, timeout_{timeout}, exceptions_{std::uncaught_exceptions()} {
  int initialised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  if (initialised == 0) {
    int provided = 0;
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
    handles_->started = true;
  }
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
  // After an error others may wait for this rank, and would wait for it here. A process that ends without MPI's goodbye
  // ends them.
  if (std::uncaught_exceptions() == exceptions_) {
    MPI_Comm_free(&handles_->world);
    if (handles_->started) MPI_Finalize();
  }
  delete handles_;
}

void MpiCommunicator::end_all() {
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

template <class Start>
void MpiCommunicator::complete(const char* what, std::size_t numbers, Start start) {
  MPI_Request request = MPI_REQUEST_NULL;
  check(start(&request), what);
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  // Most calls come together at once; a rank that waits for long lets others have the processor.
  for (std::size_t tries = 0;; ++tries) {
    int done = 0;
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
    if (done != 0) return;
    if (tries > 100) std::this_thread::yield();
    require<CommunicationError>(std::chrono::steady_clock::now() < deadline, "rank ", rank_, " of ", size_,
                                ": ", what, " of ", numbers, " numbers did not come together in ",
                                timeout_.count(), " ms: another rank is gone, or makes other calls");
  }
}

void MpiCommunicator::sum(std::span<float> numbers) {
  const int count = count_of(numbers.size());
  complete("a sum", numbers.size(), [&](MPI_Request* request) {
    return MPI_Iallreduce(MPI_IN_PLACE, numbers.data(), count, MPI_FLOAT, MPI_SUM, handles_->world, request);
  });
}

void MpiCommunicator::gather(std::span<const float> own, std::span<float> all) {
  require<CommunicationError>(all.size() == own.size() * size_, "MPI: room for ", all.size(), " numbers, ",
                              size_, " ranks send ", own.size(), " each");
  const int count = count_of(own.size());
  complete("a gathering", own.size(), [&](MPI_Request* request) {
    return MPI_Iallgather(own.data(), count, MPI_FLOAT, all.data(), count, MPI_FLOAT, handles_->world,
                          request);
  });
}

}  // namespace kvpolicy::reference
