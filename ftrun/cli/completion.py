"""Completion files for bash, zsh and fish, made from the commands that the app has; `completions/` holds the output.

Static on purpose: a shell that completes starts no Python, not even for the names of live runs. A test compares the files
with what this makes now.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

from ftrun.cli.commands.verify import ACCEPTED
from ftrun.cli.main import app, load_commands
from ftrun.cli.options import OPTIONS
from ftrun.core.errors import UsageError

SHELLS = {"bash": "ftrun.bash", "zsh": "_ftrun", "fish": "ftrun.fish"}
DEFAULT = "run"

# what a value or an argument may be; a tuple is a choice of words
FLAG, FILE, FOLDER, PLACE, SCRIPT, RUN, OTHER = "flag", "file", "folder", "place", "script", "run", "other"
Kind = str | tuple[str, ...]
_METAVARS: dict[str, Kind] = {"FILE": FILE, "DIR": FOLDER, "WHERE": PLACE, "SCRIPT": SCRIPT, "RUN": RUN, "CODE|RUN": RUN, "ARGS": FILE}


@dataclass(frozen=True)
class Opt:
    """An option by all its names, with the one kind of value it takes."""

    names: tuple[str, ...]
    help: str
    kind: Kind
    metavar: str

    @property
    def shown(self) -> str:
        """The long name with hyphens."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def offered(self) -> tuple[str, ...]:
        """The options that a shell offers: the spellings with underscores are understood, and would only double the list."""
        return tuple(name for name in self.names if "_" not in name)


@dataclass(frozen=True)
class Command:
    """A command. `arguments`: the kinds of its positional arguments, the last one repeated if `more`."""

    name: str
    help: str
    options: tuple[Opt, ...]
    arguments: tuple[Kind, ...] = ()
    more: bool = False
    wraps: bool = False  # everything after its first argument belongs to a script


def commands() -> list[Command]:
    """Every command of the app, sorted by name."""
    load_commands()
    group: Any = typer.main.get_command(app)
    return [_command(name, group.commands[name]) for name in sorted(group.commands) if not group.commands[name].hidden]


def _command(name: str, command: Any) -> Command:
    texts = {option.key: option.help for option in (*OPTIONS, *(ACCEPTED if name == "verify" else ()))}
    options, arguments = [Opt(("-h", "--help"), "Show this message and exit.", FLAG, "")], []
    for param in command.params:
        if param.param_type_name == "argument":
            metavar = param.metavar or ""
            arguments += (
                [_kind(metavar)] if "|" in metavar else [_kind(word) for word in re.findall(r"[A-Z]+", metavar)]
            )
        elif "--help" not in param.opts:
            kind = FLAG if param.is_flag else _kind(param.metavar or "")
            text = param.help or texts.get(param.name, "")
            options.append(Opt(tuple(param.opts), " ".join(text.split()), kind, param.metavar or param.name.upper()))
    wraps = arguments[:1] == [SCRIPT]
    return Command(name, command.help or "", tuple(options), tuple(arguments), bool(wraps), wraps)


def _kind(metavar: str) -> Kind:
    from ftrun.faults.kinds import KINDS, PHASES

    if metavar == "KIND":
        return tuple(f"{name}:" if kind.argument else name for name, kind in KINDS.items())
    if metavar == "PHASE":
        return tuple(PHASES)
    words = tuple(word for word in metavar.split("|") if word and word.lower() == word)
    return words or _METAVARS.get(metavar, OTHER)


# Names of live runs, as `ftrun runs` finds them; without a single quote, so that every shell can hold it in some.
_RUNS = r"""
    if [ -n "$FTRUN_RUNS_ROOT" ]; then root=$FTRUN_RUNS_ROOT
    elif [ -n "$XDG_RUNTIME_DIR" ] && [ -w "$XDG_RUNTIME_DIR" ]; then root=$XDG_RUNTIME_DIR/ftrun
    elif [ -w /dev/shm ]; then root=/dev/shm/ftrun-$(id -u)
    else root=/tmp/ftrun-$(id -u); fi
    cd "$root" 2>/dev/null || exit 0
    for run in *; do
        pid=$(sed -n "s/^{[^{}]*\"pid\": \([0-9]*\).*/\1/p" "$run/run.json" 2>/dev/null)
        [ -n "$pid" ] && [ -d "/proc/$pid" ] && echo "$run"
    done
"""


# ---- bash ----

_BASH = r"""# bash completion for ftrun. Made by `ftrun completions bash`: do not edit, a test compares the two.
# Use: source this file, or copy it to ~/.local/share/bash-completion/completions/ftrun

_ftrun_runs() {
    sh -c '@RUNS@'
}

_ftrun_options() {
    case $1 in
@OPTIONS@
    esac
}

# what the option $2 of command $1 takes: nothing at all for a flag
_ftrun_value() {
    case "$1 $2" in
@VALUES@
    esac
}

# what stands at place $2 (from 0) of command $1
_ftrun_argument() {
    case "$1 $2" in
@ARGUMENTS@
    esac
}

_ftrun_words() {
    local kind=$1
    case $kind in
        file | script | place) COMPREPLY+=($(compgen -f -- "$cur")); compopt -o filenames 2>/dev/null ;;
        folder) COMPREPLY+=($(compgen -d -- "$cur")); compopt -o filenames 2>/dev/null ;;
        run) COMPREPLY+=($(compgen -W "$(_ftrun_runs)" -- "$cur")) ;;
        words\ *) COMPREPLY+=($(compgen -W "${kind#words }" -- "$cur")) ;;
    esac
}

_ftrun() {
    local cur line command=@DEFAULT@ first="" place=0 index=1 word kind IFS=$' \t\n'
    COMPREPLY=()
    line=("${COMP_WORDS[@]:0:COMP_CWORD}")
    cur=${COMP_WORDS[COMP_CWORD]}
    # bash takes --name=value for three words
    if [[ $cur == = ]]; then line+=(=) cur=""; fi
    case " @NAMES@ " in *" ${line[1]-} "*) command=${line[1]} first=yes index=2 ;; esac
    while ((index < ${#line[@]})); do
        word=${line[index]}
        if [[ $word == -* && ! (@WRAPS@ && $place -gt 0) ]]; then
            kind=$(_ftrun_value "$command" "$word")
            if [[ -n $kind ]]; then
                [[ ${line[index + 1]-} == = ]] && ((index++))
                if ((index + 1 >= ${#line[@]})); then
                    _ftrun_words "$kind"
                    return
                fi
                ((index++))
            fi
        else
            ((place++))
        fi
        ((index++))
    done
    if [[ @WRAPS@ && $place -gt 0 ]]; then
        _ftrun_words file
        return
    fi
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$(_ftrun_options "$command")" -- "$cur"))
        return
    fi
    [[ -z $first && $place -eq 0 && ${#line[@]} -eq 1 ]] && COMPREPLY=($(compgen -W "@NAMES@" -- "$cur"))
    while read -r kind; do _ftrun_words "$kind"; done < <(_ftrun_argument "$command" "$place")
}
complete -F _ftrun ftrun
"""


def bash() -> str:
    found = commands()
    options = [f"        {c.name}) echo '{' '.join(o.shown for o in c.options)}' ;;" for c in found]
    values = [
        f"        {' | '.join(_quoted(f'{c.name} {name}') for name in o.names)}) echo '{_bash_kind(o.kind)}' ;;"
        for c in found
        for o in c.options
        if o.kind != FLAG
    ]
    arguments = [
        f"        '{c.name} {i}') printf '%s\\n' {_quoted(_bash_kind(kind))} ;;"
        for c in found
        for i, kind in enumerate(c.arguments)
    ]
    wraps = " || ".join(f"$command == {c.name}" for c in found if c.wraps)
    return _filled(
        _BASH,
        OPTIONS="\n".join(options),
        VALUES="\n".join(values),
        ARGUMENTS="\n".join(arguments),
        NAMES=" ".join(c.name for c in found),
        WRAPS=f"( {wraps} )",
        DEFAULT=DEFAULT,
    )


def _bash_kind(kind: Kind) -> str:
    return kind if isinstance(kind, str) else f"words {' '.join(kind)}"


def _quoted(text: str) -> str:
    return f"'{text}'"


def _filled(template: str, **parts: str) -> str:
    for name, part in {**parts, "RUNS": _RUNS}.items():
        template = template.replace(f"@{name}@", part)
    return template


# ---- zsh ----

_ZSH = r"""#compdef ftrun
# zsh completion for ftrun. Made by `ftrun completions zsh`: do not edit, a test compares the two.
# Use: put this file into a folder of your fpath, before compinit.

_ftrun_live_names() {
    local -a names
    names=(${(f)"$(sh -c '@RUNS@')"})
    compadd -a names
}

@FUNCTIONS@

_ftrun() {
    local -a names
    names=(
@NAMES@
    )
    if (( CURRENT > 2 )) && (( $+functions[_ftrun_${words[2]}] )); then
        local command=${words[2]}
        shift words
        (( CURRENT-- ))
        _ftrun_$command
        return
    fi
    if (( CURRENT == 2 )) && [[ $PREFIX != -* ]]; then
        _describe -t commands command names
    fi
    _ftrun_@DEFAULT@
}

if [[ ${funcstack[1]} == _ftrun ]]; then
    _ftrun "$@"
else
    compdef _ftrun ftrun
fi
"""


def zsh() -> str:
    found = commands()
    functions = []
    for command in found:
        specs = [spec for option in command.options for spec in _zsh_option(option)]
        for number, kind in enumerate(command.arguments, 1):
            last = command.more and number == len(command.arguments)
            place = "*" if last else str(number)
            specs.append(f"'{place}:{_zsh_name(kind)}:{_zsh_action(kind)}'")
        stop = "-A '-*' " if command.wraps else ""  # no option of ours behind the script
        functions.append(
            f"_ftrun_{command.name}() {{\n    _arguments -s {stop}\\\n        " + " \\\n        ".join(specs) + "\n}"
        )
    names = "\n".join(f"        '{c.name}:{_zsh_text(c.help)}'" for c in found)
    return _filled(_ZSH, FUNCTIONS="\n\n".join(functions), NAMES=names, DEFAULT=DEFAULT)


def _zsh_option(option: Opt) -> Iterator[str]:
    for name in option.offered:
        if option.kind == FLAG:
            yield f"'{name}[{_zsh_text(option.help)}]'"
        else:
            joined = "=" if name.startswith("--") else "+"
            yield f"'{name}{joined}[{_zsh_text(option.help)}]:{_zsh_text(option.metavar)}:{_zsh_action(option.kind)}'"


def _zsh_action(kind: Kind) -> str:
    if isinstance(kind, tuple):
        return f"({' '.join(word.replace(':', chr(92) + ':') for word in kind)})"
    return {FILE: "_files", PLACE: "_files", FOLDER: "_files -/", SCRIPT: "_files", RUN: "_ftrun_live_names"}.get(
        kind, " "
    )


def _zsh_name(kind: Kind) -> str:
    return kind if isinstance(kind, str) else "kind"


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text).replace("'", "'\\''")


# ---- fish ----

_FISH = r"""# fish completion for ftrun. Made by `ftrun completions fish`: do not edit, a test compares the two.
# Use: copy this file to ~/.config/fish/completions/ftrun.fish

function __ftrun_runs
    sh -c '@RUNS@'
end

# is the command line about command $argv[1], and is there no script yet?
function __ftrun_in
    set -l tokens (commandline -opc)
    set -e tokens[1]
    set -l command @DEFAULT@
    if contains -- "$tokens[1]" @NAMES@
        set command $tokens[1]
        set -e tokens[1]
    end
    test "$command" = "$argv[1]"; or return 1
    contains -- $command @WRAPS@; or return 0
    set -l value 0
    for token in $tokens
        if test $value = 1
            set value 0
        else if string match -q -- '-*' $token
            contains -- $token @TAKING@; and set value 1
        else
            return 1
        end
    end
    return 0
end

function __ftrun_at_start
    test (count (commandline -opc)) -eq 1
end

@LINES@
"""


def fish() -> str:
    found = commands()
    lines = [f"complete -c ftrun -n __ftrun_at_start -a {c.name} -d '{_fish_text(c.help)}'" for c in found]
    for command in found:
        condition = f"complete -c ftrun -n '__ftrun_in {command.name}'"
        for option in command.options:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.offered)
            lines.append(f"{condition} {names} -d '{_fish_text(option.help)}'{_fish_action(option.kind)}")
        for kind in command.arguments:
            if kind == RUN or isinstance(kind, tuple):
                lines.append(f"{condition}{_fish_action(kind).replace(' -x', ' -f')}")
    taking = {name for c in found if c.wraps for o in c.options if o.kind != FLAG for name in o.names}
    return _filled(
        _FISH,
        LINES="\n".join(lines),
        NAMES=" ".join(c.name for c in found),
        WRAPS=" ".join(c.name for c in found if c.wraps),
        TAKING=" ".join(sorted(taking)),
        DEFAULT=DEFAULT,
    )


def _fish_action(kind: Kind) -> str:
    if isinstance(kind, tuple):
        return f" -x -a '{' '.join(kind)}'"
    return {
        FLAG: "",
        FILE: " -r -F",
        PLACE: " -r -F",
        FOLDER: " -x -a '(__fish_complete_directories)'",
        RUN: " -x -a '(__ftrun_runs)'",
        OTHER: " -x",
    }[kind]


def _fish_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def printed(shell: str) -> None:
    """Print the completion file of a shell.

    Raises:
        UsageError
    """
    if shell not in SHELLS:
        raise UsageError(f"there are completions for {', '.join(SHELLS)}, not for {shell!r}")
    print(made_for(shell), end="")


def made_for(shell: str) -> str:
    """The completion file of a shell.

    Raises:
        KeyError
    """
    return {"bash": bash, "zsh": zsh, "fish": fish}[shell]()
