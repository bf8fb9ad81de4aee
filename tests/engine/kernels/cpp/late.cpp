// Makes threads of this process late: stops them for a while at random points, as a busy machine does.
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

namespace {

std::atomic<bool> goes_on{false};
std::thread stopper;

void sleep_us(long us) {
    const timespec time{0, us * 1000};
    nanosleep(&time, nullptr);
}

void stop(int) { sleep_us(300); }

}  // namespace

// Begins to stop the threads, one at a time, for some 300 us each.
extern "C" void late_begin(const int* threads, int count) {
    struct sigaction action{};
    action.sa_handler = stop;
    action.sa_flags = SA_RESTART;
    sigaction(SIGURG, &action, nullptr);
    goes_on = true;
    stopper = std::thread([ids = std::vector<int>(threads, threads + count)] {
        std::mt19937 random(5);
        while (goes_on) {
            syscall(SYS_tgkill, getpid(), ids[random() % ids.size()], SIGURG);
            sleep_us(long(random() % 500));
        }
    });
}

extern "C" void late_end() {
    goes_on = false;
    stopper.join();
}
