// FAKE_ACL_LOG=FILE appends a line for everything that would reach the device, so that a test can look.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

inline void fake_log(const std::string &line)
{
    static const char *path = std::getenv("FAKE_ACL_LOG");
    if (path == nullptr) return;
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    std::FILE *file = std::fopen(path, "a");
    std::fprintf(file, "%s\n", line.c_str());
    std::fclose(file);
}
