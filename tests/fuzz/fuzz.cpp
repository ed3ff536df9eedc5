// Fuzz target of the kernels: whatever the bytes say, an answer that holds or an exception, and no memory but
// its own. All arrays have exactly the size that is promised, so that the address sanitizer sees the first
// byte beside.
//
// With clang: clang++ -fsanitize=fuzzer,address,undefined -DMULTIPACK_LIBFUZZER ...; without, `main` makes
// the bytes from a seed.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "targets.h"

namespace {

/// Whether the case ended without an exception.
bool run_case(const uint8_t* data, size_t size) {
    Bytes bytes(data, size);
    try {
        switch (bytes.between(0, 9)) {
            case 0:
                fuzz_pack(bytes);
                break;
            case 1:
                fuzz_pool(bytes);
                break;
            case 2:
                fuzz_permutation(bytes);
                break;
            case 3:
                fuzz_numbers(bytes);
                break;
            case 4:
                fuzz_bins(bytes);
                break;
            case 5:
                fuzz_integer_set(bytes);
                break;
            case 6:
                fuzz_state(bytes);
                break;
            default:
                fuzz_gather(bytes);
        }
        return true;
    } catch (const std::invalid_argument&) {
    } catch (const std::out_of_range&) {
    }
    return false;
}

}  // namespace

#ifdef MULTIPACK_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    run_case(data, size);
    return 0;
}
#else
/// fuzz SECONDS SEED [THREADS]: random cases for so long.
int main(int argc, char** argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: %s SECONDS SEED [THREADS]\n", argv[0]);
        return 2;
    }
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(argv[1]));
    const uint64_t seed = std::strtoull(argv[2], nullptr, 10);
    const int num_threads = argc > 3 ? std::atoi(argv[3]) : 1;
    std::atomic<int64_t> held{0}, refused{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) {
        threads.emplace_back([&, t] {
            std::mt19937_64 random(seed + t);
            while (std::chrono::steady_clock::now() < deadline) {
                std::vector<uint64_t> words(200 + random() % 400);
                for (uint64_t& word : words) word = random();
                (run_case(reinterpret_cast<const uint8_t*>(words.data()), words.size() * 8) ? held
                                                                                            : refused)++;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    std::printf("%lld cases held, %lld were refused\n", static_cast<long long>(held),
                static_cast<long long>(refused));
    return held > 100 && refused > 100 ? 0 : 1;
}
#endif
