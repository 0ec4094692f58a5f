"""Words that try to be more than words. CANARY is replaced by a path that must never come to exist."""

from __future__ import annotations

SHELL = [
    "; touch CANARY",
    "&& touch CANARY",
    "|| touch CANARY",
    "| touch CANARY",
    "& touch CANARY",
    "$(touch CANARY)",
    "`touch CANARY`",
    "${IFS}touch${IFS}CANARY",
    "$(touch${IFS}CANARY)",
    "'; touch CANARY; '",
    '"; touch CANARY; "',
    "'$(touch CANARY)'",
    '"$(touch CANARY)"',
    "\\'; touch CANARY #",
    "<(touch CANARY)",
    "> CANARY",
    ">> CANARY",
    "x > CANARY",
    "{touch,CANARY}",
    "a\ntouch CANARY",
    "a\r\ntouch CANARY",
    "a\n#SBATCH --wrap=touch CANARY",
    "a\x0btouch CANARY",
    "a\u2028touch CANARY",
    "a\x85touch CANARY",
    "$'\\ntouch CANARY'",
    "!touch CANARY",
    "*; touch CANARY",
    "~$(touch CANARY)",
    "$((`touch CANARY`))",
    "${x:-$(touch CANARY)}",
    "$[$(touch CANARY)]",
    "a) touch CANARY ;; *",
    "EOF\ntouch CANARY",
    "\\\ntouch CANARY",
    "word; exec touch CANARY",
]

OPTIONS = [
    "-oProxyCommand=touch CANARY",
    "-o ProxyCommand=touch CANARY",
    "--wrap=touch CANARY",
    "-F/dev/stdin",
    "--privileged",
    "--volume=/:/host",
    "--",
    "-",
    "-E CANARY",
    "--output=CANARY",
    "--prolog=CANARY",
    "--export=ALL,LD_PRELOAD=CANARY",
]

ODD = [
    "",
    " ",
    "\x00",
    "a\x00b",
    "\ud800",
    "a b",
    "\t",
    "x" * 5000,
    "é" * 3000,
    "..",
    "%n%s%x",
    "{0}",
    "%s%s%n",
    "\x1b[2J",
]

BINDS = ["/etc:/etc:rw,/:/host", "/a,/b", "/a:/b:/c", "/a:b", ":/b", "/a:", "/:/host:rw", "a:-v"]

PAYLOADS = [*SHELL, *OPTIONS, *ODD, *BINDS]
