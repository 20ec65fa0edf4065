// A fake of CANN's libplatform: sizes of an Ascend 950DT, or what FAKE_PLATFORM says: "UB=1024 L1=0", where 0 is no
// answer, or "unknown", which is no chip.
#include <cstdint>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>

bool fake_platform(const std::string &buffer, uint64_t &size)
{
    static const std::map<std::string, uint64_t> SIZES{
        {"UB", 248 << 10}, {"L1", 512 << 10}, {"L0_A", 64 << 10}, {"L0_B", 64 << 10}, {"L0_C", 256 << 10}};
    const char *said = std::getenv("FAKE_PLATFORM");
    std::istringstream words(said == nullptr ? "" : said);
    uint64_t found = SIZES.at(buffer);
    for (std::string word; words >> word;) {
        if (word == "unknown") return false;
        if (word.rfind(buffer + "=", 0) == 0) found = std::stoull(word.substr(buffer.size() + 1));
    }
    if (found > 0) size = found;
    return true;
}
