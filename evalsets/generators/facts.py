#!/usr/bin/env python3
"""Write evalsets/tasks/facts.jsonl: four-way cloze questions about plain facts.

Run from the parent of evalsets:  python evalsets/generators/facts.py
Only the standard library is used, and every choice that looks random is a rank
by SHA-256, so the file is the same on every machine and Python version.

A row: id, slice (the kind of fact), cluster (the table entry it came from),
context, choices (four strings that begin with a space), answer (0-3).
"""
import hashlib
import json
import sys
from pathlib import Path

SEED = "facts-1"
OUT = Path(__file__).resolve().parent.parent / "tasks" / "facts.jsonl"


def rank(items, *key):
    """items in an order fixed by SEED and key."""
    def h(x):
        return hashlib.sha256("\x1f".join((SEED, *key, x)).encode()).hexdigest()
    return sorted(items, key=h)


def table(text):
    """'a = b = c' lines (or several on a line, split by ';') -> list of lists."""
    rows = []
    for part in text.replace("\n", ";").split(";"):
        if part.strip():
            rows.append([c.strip() for c in part.split("=")])
    return rows


def words(text):
    return [w.strip() for w in text.split(",") if w.strip()]


ITEMS = []


def add(slice_, entry, context, answer, pool, ban=(), near=(), n_near=2):
    """One question. pool: candidates for distractors; near: harder ones, taken first."""
    banned = {answer, *ban}
    key = (slice_, entry, context)
    cand = [c for c in dict.fromkeys(near) if c not in banned]
    picked = rank(cand, *key, "near")[:n_near]
    rest = [c for c in dict.fromkeys(pool) if c not in banned and c not in picked]
    picked += rank(rest, *key, "pool")[: 3 - len(picked)]
    assert len(picked) == 3, (slice_, entry, picked)
    ITEMS.append({"slice": slice_, "cluster": entry, "context": context,
                  "answer_text": answer, "distractors": picked})


# ---------------------------------------------------------------- capitals
CAPITALS = {
    "Europe": """
France=Paris; Germany=Berlin; Italy=Rome; Spain=Madrid; Portugal=Lisbon; Greece=Athens
Austria=Vienna; Poland=Warsaw; Hungary=Budapest; Sweden=Stockholm; Norway=Oslo
Finland=Helsinki; Denmark=Copenhagen; Ireland=Dublin; Belgium=Brussels; Romania=Bucharest
Bulgaria=Sofia; Croatia=Zagreb; Serbia=Belgrade; Latvia=Riga; Estonia=Tallinn
Lithuania=Vilnius; Iceland=Reykjavik; Albania=Tirana; Slovenia=Ljubljana""",
    "Asia": """
Japan=Tokyo; China=Beijing=Shanghai; South Korea=Seoul; Thailand=Bangkok
Vietnam=Hanoi=Ho Chi Minh City; India=New Delhi=Mumbai; Pakistan=Islamabad=Karachi
Bangladesh=Dhaka; Nepal=Kathmandu; Mongolia=Ulaanbaatar; Iran=Tehran; Iraq=Baghdad
Syria=Damascus=Aleppo; Jordan=Amman; Lebanon=Beirut; Saudi Arabia=Riyadh=Jeddah; Qatar=Doha
Afghanistan=Kabul=Kandahar; the Philippines=Manila; Cambodia=Phnom Penh; Turkey=Ankara=Istanbul
Australia=Canberra=Sydney; New Zealand=Wellington=Auckland; Fiji=Suva""",
    "Africa": """
Egypt=Cairo=Alexandria; Kenya=Nairobi=Mombasa; Ethiopia=Addis Ababa; Nigeria=Abuja=Lagos; Ghana=Accra
Senegal=Dakar; Morocco=Rabat=Casablanca; Tunisia=Tunis; Libya=Tripoli; Uganda=Kampala
Rwanda=Kigali; Zambia=Lusaka; Zimbabwe=Harare; Angola=Luanda; Namibia=Windhoek
Madagascar=Antananarivo; Mali=Bamako=Timbuktu; Somalia=Mogadishu""",
    "Americas": """
Canada=Ottawa=Toronto; Cuba=Havana; Jamaica=Kingston; Brazil=Brasilia=Rio de Janeiro
Argentina=Buenos Aires; Peru=Lima; Colombia=Bogota; Venezuela=Caracas; Ecuador=Quito
Uruguay=Montevideo; Nicaragua=Managua; Haiti=Port-au-Prince""",
}
cap = {r: table(t) for r, t in CAPITALS.items()}
all_caps = [row[1] for rows in cap.values() for row in rows]
all_countries = [row[0] for rows in cap.values() for row in rows]
# these are asked the other way round, so that no country is asked twice
REVERSE = words("Lisbon, Warsaw, Budapest, Oslo, Helsinki, Sofia, Riga, Vienna, Dublin, Zagreb, Bangkok, Hanoi, Tehran, "
                "Baghdad, Beirut, Kabul, Nairobi, Accra, Dakar, Kampala, Tripoli, Ottawa, Havana, Lima, Caracas, Kingston")
for _region, rows in cap.items():
    for row in rows:
        country, city, other = row[0], row[1], row[2:]
        if city in REVERSE:
            continue
        near = [r[1] for r in rows]
        if other:   # the biggest city that isn't the capital, then one of the region
            alt = rank([c for c in near if c != city], "capalt", country)[0]
            near = [*other, alt]
        add("capitals", "country/" + country, f"The capital of {country} is", city, all_caps, near=near)
for _region, rows in cap.items():
    for row in rows:
        if row[1] in REVERSE:
            add("capitals_reverse", "country/" + row[0], f"{row[1]} is the capital city of", row[0],
                all_countries, near=[r[0] for r in rows])

STATES = table("""
Texas=Austin=Houston; California=Sacramento=Los Angeles; Florida=Tallahassee=Miami
Illinois=Springfield=Chicago; Georgia=Atlanta=Savannah; Massachusetts=Boston=Worcester
Colorado=Denver=Aspen; Arizona=Phoenix=Tucson; Ohio=Columbus=Cleveland; Michigan=Lansing=Detroit
Washington=Olympia=Seattle; Oregon=Salem=Portland; Nevada=Carson City=Las Vegas
Pennsylvania=Harrisburg=Philadelphia; Virginia=Richmond=Norfolk; Tennessee=Nashville=Memphis
Louisiana=Baton Rouge=New Orleans; Wisconsin=Madison=Milwaukee; Hawaii=Honolulu=Hilo
Alaska=Juneau=Anchorage; Alabama=Montgomery=Birmingham; Maryland=Annapolis=Baltimore
Nebraska=Lincoln=Omaha; Missouri=Jefferson City=St. Louis; Idaho=Boise=Twin Falls
Kansas=Topeka=Wichita""")
for s, c, big in STATES:
    add("us_state_capitals", "state/" + s, f"The capital of the U.S. state of {s} is", c,
        [r[1] for r in STATES], near=[big], n_near=1)

# ---------------------------------------------------------------- continents
CONTINENTS = {
    "Africa": "Ghana, Zambia, Uganda, Mali, Botswana, Malawi",
    "Asia": "Thailand, Mongolia, Nepal, Laos, Bhutan",
    "Europe": "Austria, Switzerland, Romania, Slovakia, Latvia",
    "South America": "Bolivia, Paraguay, Uruguay, Brazil",
    "North America": "Canada, Guatemala, Honduras",
}
for cont, cs in CONTINENTS.items():
    for c in words(cs):
        add("continents", "continent/" + c, f"The country of {c} is located on the continent of", cont,
            list(CONTINENTS))

# ---------------------------------------------------------------- elements
ELEMENTS = table("""
hydrogen=H=1; helium=He=2; lithium=Li=3; carbon=C=6; nitrogen=N=7; oxygen=O=8; fluorine=F=9
neon=Ne=10; sodium=Na=11; magnesium=Mg=12; aluminum=Al=13; silicon=Si=14; phosphorus=P=15
sulfur=S=16; chlorine=Cl=17; argon=Ar=18; potassium=K=19; calcium=Ca=20; titanium=Ti=22
chromium=Cr=24; manganese=Mn=25; iron=Fe=26; cobalt=Co=27; nickel=Ni=28; copper=Cu=29
zinc=Zn=30; arsenic=As=33; bromine=Br=35; strontium=Sr=38; silver=Ag=47; tin=Sn=50; antimony=Sb=51
iodine=I=53; barium=Ba=56; tungsten=W=74; platinum=Pt=78; gold=Au=79; mercury=Hg=80; lead=Pb=82
radon=Rn=86; uranium=U=92; plutonium=Pu=94""")
symbols = [e[1] for e in ELEMENTS]
for name, sym, _num in ELEMENTS:
    if sym in "H Li C N O F Ne S B U I Ba Sr".split():      # too easy for any model
        continue
    # the harder ones: symbols that share a letter with the name's beginning or the symbol's
    near = [s for s in symbols if s[0] == sym[0] or s[0].lower() == name[0]]
    add("element_symbols", "element/" + name, f"The chemical symbol for {name} is", sym, symbols, near=near)
names = [e[0] for e in ELEMENTS]
for name, sym, _num in ELEMENTS:
    if sym in "He Na K Fe Au Ag Hg Pb Sn W Cu Ca Zn Mg Pu Sb As Co Si P S Cl Mn Sr Ba".split():
        near = [n for n in names if n[0] == sym[0].lower()]
        add("element_names", "element/" + name, f"The chemical element with the symbol {sym} is", name, names, near=near)
for name, _sym, num in ELEMENTS:
    if num in "1 2 3 6 7 8 9 10 11 12 13 14 20 26 29 47 79 80 82 92".split():
        near = [e[0] for e in ELEMENTS if e[2] != num and abs(int(e[2]) - int(num)) <= 4]
        add("atomic_numbers", "element/" + name, f"The chemical element with atomic number {num} is", name, names, near=near)

# ---------------------------------------------------------------- currencies
CURRENCIES = table("""
Japan=yen; Thailand=baht; Vietnam=dong; Poland=zloty; Hungary=forint; Sweden=krona; Norway=krone
Switzerland=franc; the United Kingdom=pound; India=rupee; China=yuan; South Korea=won; Russia=ruble
Turkey=lira; Brazil=real; Mexico=peso; South Africa=rand; Israel=shekel; Saudi Arabia=riyal
Malaysia=ringgit; Indonesia=rupiah; Bangladesh=taka; Ethiopia=birr; Ukraine=hryvnia; Nigeria=naira
Ghana=cedi; Kenya=shilling; Peru=sol; Guatemala=quetzal; Morocco=dirham; Kuwait=dinar; Germany=euro
Canada=dollar; the Philippines=peso; Zambia=kwacha; Romania=leu; Mongolia=tugrik; Pakistan=rupee
Georgia=lari; Argentina=peso""")
SAME_CUR = [{"krona", "krone"}, {"real", "riyal"}, {"rupee", "rupiah"}]
for c, cur in CURRENCIES:
    ban = set().union(*[g for g in SAME_CUR if cur in g])
    add("currencies", "currency/" + c, f"The currency of {c} is the", cur, [r[1] for r in CURRENCIES], ban=ban)

# ---------------------------------------------------------------- languages
LANGUAGES = table("""
Brazil=Portuguese; Mexico=Spanish; Egypt=Arabic; Austria=German; Iran=Persian; Angola=Portuguese; Argentina=Spanish
Bangladesh=Bengali; Cuba=Spanish; the Netherlands=Dutch; Jordan=Arabic; Chile=Spanish; Cambodia=Khmer; Liechtenstein=German
Libya=Arabic; Australia=English; Israel=Hebrew; Japan=Japanese""")
for c, spoken in LANGUAGES:
    add("languages", "language/" + c, f"The main language spoken in {c} is", spoken, [r[1] for r in LANGUAGES],
        ban=["Arabic"] if spoken == "Hebrew" else ())

# ---------------------------------------------------------------- authors
NOVELS = table("""
Moby-Dick=Herman Melville; Pride and Prejudice=Jane Austen; War and Peace=Leo Tolstoy
Crime and Punishment=Fyodor Dostoevsky; Great Expectations=Charles Dickens; Jane Eyre=Charlotte Bronte
Wuthering Heights=Emily Bronte; Frankenstein=Mary Shelley; Dracula=Bram Stoker
The Adventures of Huckleberry Finn=Mark Twain; The Great Gatsby=F. Scott Fitzgerald
The Old Man and the Sea=Ernest Hemingway; The Grapes of Wrath=John Steinbeck
To Kill a Mockingbird=Harper Lee; Nineteen Eighty-Four=George Orwell; Brave New World=Aldous Huxley
The Catcher in the Rye=J. D. Salinger; Beloved=Toni Morrison; Things Fall Apart=Chinua Achebe
One Hundred Years of Solitude=Gabriel Garcia Marquez; Don Quixote=Miguel de Cervantes
The Metamorphosis=Franz Kafka; The Stranger=Albert Camus; Les Miserables=Victor Hugo
The Three Musketeers=Alexandre Dumas; Madame Bovary=Gustave Flaubert; The Time Machine=H. G. Wells
Treasure Island=Robert Louis Stevenson; Robinson Crusoe=Daniel Defoe; Gulliver's Travels=Jonathan Swift
The Hobbit=J. R. R. Tolkien; The Picture of Dorian Gray=Oscar Wilde; Mrs Dalloway=Virginia Woolf
Ulysses=James Joyce; The Scarlet Letter=Nathaniel Hawthorne; Little Women=Louisa May Alcott
The Jungle Book=Rudyard Kipling; Fahrenheit 451=Ray Bradbury; Lord of the Flies=William Golding
Slaughterhouse-Five=Kurt Vonnegut; Middlemarch=George Eliot""")
for w, a in NOVELS:
    add("authors", "book/" + w, f'The book "{w}" was written by', a, [r[1] for r in NOVELS])
for w, a in NOVELS:
    if a in ("Jane Austen", "Herman Melville", "Leo Tolstoy", "Mary Shelley", "Bram Stoker", "Harper Lee",
             "Victor Hugo", "Ray Bradbury", "Daniel Defoe", "James Joyce", "Harper Lee", "William Golding",
             "Toni Morrison", "Albert Camus", "Miguel de Cervantes", "Kurt Vonnegut"):
        add("works", "book/" + w, f"{a} is the author of", w, [r[0] for r in NOVELS])

# ---------------------------------------------------------------- art and music
PAINTINGS = table("""
Mona Lisa=Leonardo da Vinci; The Starry Night=Vincent van Gogh; Guernica=Pablo Picasso
The Scream=Edvard Munch; The Night Watch=Rembrandt; Girl with a Pearl Earring=Johannes Vermeer
The Persistence of Memory=Salvador Dali; The Birth of Venus=Sandro Botticelli; The Kiss=Gustav Klimt
American Gothic=Grant Wood; Water Lilies=Claude Monet; Las Meninas=Diego Velazquez
Nighthawks=Edward Hopper; Liberty Leading the People=Eugene Delacroix; The Hay Wain=John Constable
The Fighting Temeraire=J. M. W. Turner; Impression, Sunrise=Claude Monet; A Sunday Afternoon on the Island of La Grande Jatte=Georges Seurat
The Great Wave off Kanagawa=Katsushika Hokusai; The Third of May 1808=Francisco Goya; The Garden of Earthly Delights=Hieronymus Bosch""")
for w, a in PAINTINGS:
    add("paintings", "painting/" + w, f'The work of art "{w}" was made by', a, [r[1] for r in PAINTINGS],
        ban=["Edvard Munch"] if w in ("The Starry Night", "The Kiss") else ())    # he painted two of these names
MUSIC = table("""
The Four Seasons=Vivaldi; the Moonlight Sonata=Beethoven; Swan Lake=Tchaikovsky
The Magic Flute=Mozart; the Brandenburg Concertos=Bach; Messiah=Handel
The Rite of Spring=Stravinsky; the New World Symphony=Dvorak; The Planets=Holst; Peer Gynt=Grieg; Clair de Lune=Debussy
Bolero=Ravel; Carmen=Bizet; Aida=Verdi
Rhapsody in Blue=Gershwin; The Barber of Seville=Rossini; Tosca=Puccini""")
for w, a in MUSIC:
    add("music", "music/" + w, f"The composer who wrote {w} was", a, [r[1] for r in MUSIC])

# ---------------------------------------------------------------- discoveries and inventions
DISCOVERIES = table("""
The telephone was invented by=Alexander Graham Bell
Penicillin was discovered by=Alexander Fleming
Dynamite was invented by=Alfred Nobel
The phonograph was invented by=Thomas Edison
The World Wide Web was invented by=Tim Berners-Lee
The theory of general relativity was developed by=Albert Einstein
The law of universal gravitation was formulated by=Isaac Newton
The theory of evolution by natural selection was proposed by=Charles Darwin
The periodic table of the elements was published in 1869 by=Dmitri Mendeleev
The laws of planetary motion were discovered by=Johannes Kepler
The polio vaccine introduced in 1955 was developed by=Jonas Salk
The vaccine against smallpox was introduced in 1796 by=Edward Jenner
The vaccine against rabies was developed by=Louis Pasteur
The laws of inheritance were found in pea plants by=Gregor Mendel
X-rays were discovered by=Wilhelm Roentgen
The electron was discovered by=J. J. Thomson
The neutron was discovered by=James Chadwick
The atomic nucleus was discovered by=Ernest Rutherford
The uncertainty principle was introduced by=Werner Heisenberg
The theory of continental drift was proposed in 1912 by=Alfred Wegener
The circulation of blood was described in 1628 by=William Harvey
The planet Uranus was discovered by=William Herschel
Pluto was discovered in 1930 by=Clyde Tombaugh
The four largest moons of Jupiter were discovered by=Galileo Galilei
The element radium was discovered by Pierre Curie and=Marie Curie
The first electric battery was invented by=Alessandro Volta
The reading system of raised dots for blind people was invented by=Louis Braille
The Linux kernel was created by=Linus Torvalds
The programming language Python was created by=Guido van Rossum
The programming language C was created by=Dennis Ritchie
The mercury barometer was invented by=Evangelista Torricelli
The cotton gin was invented by=Eli Whitney
The model in which the planets circle the Sun was published in 1543 by=Nicolaus Copernicus
The equations of the electromagnetic field were formulated by=James Clerk Maxwell""")
for ctx, who in DISCOVERIES:
    add("discoverers", "discovery/" + who, ctx, who, [r[1] for r in DISCOVERIES])

# ---------------------------------------------------------------- animals
# young = answer = other right names (never used as distractors)
YOUNG = table("""
a kangaroo=a joey=; a cat=a kitten=; a dog=a puppy=a pup; a cow=a calf=; a horse=a foal=a colt
a sheep=a lamb=; a goat=a kid=; a pig=a piglet=a shoat; a duck=a duckling=; a goose=a gosling=
a swan=a cygnet=a chick; a frog=a tadpole=; a lion=a cub=; a bear=a cub=; a deer=a fawn=a calf,a kid
an elephant=a calf=; a whale=a calf=a cub,a pup; a seal=a pup=a cub,a puppy,a calf; an owl=an owlet=a chick; an eagle=an eaglet=a chick""")
for a, y, alt in YOUNG:
    ban = set(words(alt))
    add("animal_young", "young/" + a.split(" ", 1)[1], f"The young of {a} is called", y, [r[1] for r in YOUNG], ban=ban)
GROUPS = table("""
lions=a pride; wolves=a pack; cattle=a herd; fish=a school; sheep=a flock
puppies born together=a litter; ants=a colony; crows=a murder; bees=a swarm""")
GROUP_BAN = {"cattle": ["a drove"], "sheep": ["a herd", "a drove"], "ants": ["a swarm"], "bees": ["a colony"],
             "crows": ["a flock"], "wolves": ["a herd"], "fish": ["a swarm", "a flock", "a colony"], "lions": ["a pack"]}
for g, n in GROUPS:
    add("animal_groups", "group/" + g, f"A group of {g} is called", n, [r[1] for r in GROUPS], ban=GROUP_BAN.get(g, ()))

# ---------------------------------------------------------------- units and instruments
UNITS = table("""
force=newton; energy=joule; power=watt; electric current=ampere; temperature=kelvin; frequency=hertz
pressure=pascal; electrical resistance=ohm; mass=kilogram; length=meter; time=second; electric charge=coulomb
luminous intensity=candela; amount of substance=mole; magnetic flux density=tesla""")
for q, u in UNITS:
    add("units", "unit/" + q, f"The SI unit of {q} is the", u, [r[1] for r in UNITS])
INSTRUMENTS = table("""
measure temperature=thermometer; measure air pressure=barometer; record earthquakes=seismograph
find north=compass; measure humidity=hygrometer; measure angles=protractor
measure the speed of a car=speedometer; tell time by the shadow of the Sun=sundial; measure blood pressure=sphygmomanometer
keep musical time=metronome; draw a circle=compass; look out of a submarine=periscope""")
for q, u in INSTRUMENTS:
    add("instruments", "instrument/" + q, f"The instrument used to {q} is called a", u, [r[1] for r in INSTRUMENTS],
        ban=["compass"] if "angles" in q else ())

# ---------------------------------------------------------------- quantities (with their own distractors)
QUANTITIES = table("""
A week has=seven=six,eight,nine=days
A year has=twelve=ten,eleven,fourteen=months
A day has=twenty-four=twenty,thirty,thirty-six=hours
An hour has=sixty=fifty,ninety,seventy=minutes
A triangle has=three=four,five,six=sides
A hexagon has=six=five,seven,eight=sides
An octagon has=eight=six,seven,ten=sides
A pentagon has=five=four,six,seven=sides
A decagon has=ten=eight,nine,twelve=sides
A spider has=eight=six,ten,four=legs
An insect has=six=eight,four,ten=legs
A crab has=ten=six,four,twelve=legs, counting its claws
The Solar System has=eight=seven,ten,twelve=planets
The flag of the United States has=fifty=forty,sixty,thirteen=stars
The flag of the United States has=thirteen=ten,twelve,fifteen=stripes
The English alphabet has=twenty-six=twenty-four,twenty-eight,thirty=letters
A century has=one hundred=ten,fifty,five hundred=years
A decade has=ten=twelve,five,twenty=years
A chessboard has=sixty-four=forty-nine,eighty-one,thirty-six=squares
At the start of a chess game, each player has=sixteen=twelve,eighteen,twenty=pieces
A tricycle has=three=two,four,six=wheels
The human heart has=four=two,three,six=chambers
A violin has=four=five,six,three=strings
A standard guitar has=six=four,five,eight=strings
On the field, a soccer team has=eleven=nine,ten,twelve=players
On the court, a basketball team has=five=six,seven,four=players
On the field, a baseball team has=nine=seven,eight,eleven=players
A right angle has=ninety=sixty,eighty,one hundred=degrees
A cube has=six=four,eight,twelve=faces
A cube has=twelve=six,eight,ten=edges
A foot has=twelve=ten,sixteen,eight=inches
A yard has=three=two,four,six=feet
A pound has=sixteen=fourteen,ten,eight=ounces
A kilometer has=one thousand=one hundred,five hundred,ten thousand=meters
An octopus has=eight=six,ten,seven=arms
A standard deck without jokers has=fifty-two=forty-eight,fifty-four,sixty=cards
A standard piano has=eighty-eight=seventy-two,sixty-four,ninety-six=keys
A haiku has=three=two,four,five=lines
A sonnet has=fourteen=ten,twelve,sixteen=lines
A dozen eggs is=twelve=ten,eleven,fifteen=eggs""")
for ctx, a, d, noun in QUANTITIES:
    add("quantities", f"quantity/{ctx}/{noun}", f"How many {noun.split(',')[0]}? {ctx}", f"{a} {noun}", [f"{w} {noun}" for w in words(d)])

# ---------------------------------------------------------------- opposites
OPPOSITES = table("""
late=early; full=empty; rich=poor; dry=wet; success=failure; victory=defeat; ancient=modern
transparent=opaque; scarce=abundant; temporary=permanent; generous=stingy; polite=rude; rough=smooth; sharp=blunt
tight=loose; guilty=innocent; public=private; artificial=natural; horizontal=vertical; maximum=minimum; exterior=interior
expand=contract; reject=accept; depart=arrive; criticize=praise; import=export
ascend=descend; humble=arrogant; lazy=diligent; optimistic=pessimistic""")
# a distractor from the same set could pass for an opposite, or for a near one
OPP_SETS = [set(words(s)) for s in (
    "hot, fast, light, early, empty, rich, strong, wet, young, cold, slow, dark, late, full, poor, weak, dry, old, modern",
    "success, victory, failure, defeat", "ancient, young, modern, old, late", "scarce, rich, abundant, full, poor",
    "generous, polite, brave, humble, lazy, optimistic, stingy, rude, cowardly, arrogant, diligent, pessimistic, weak",
    "rough, sharp, tight, smooth, blunt, loose", "public, exterior, private, interior",
    "expand, accept, attack, ascend, praise, arrive, contract, reject, descend, criticize, depart, defend",
    "light, transparent, opaque, dark")]
POS = {**{w: "verb" for r in OPPOSITES for w in r if r[0] in
          "expand reject depart criticize import ascend".split()},
       **{w: "noun" for r in OPPOSITES for w in r if r[0] in "success victory".split()}}
EXTRA = {"verb": words("repeat, gather, measure, finish, travel, decorate, explain"),
         "noun": words("journey, weather, advice, history, method"),
         "adj": words("round, purple, wooden, musical, hungry, nervous, salty, northern, monthly, medical")}
for a, b in OPPOSITES:
    pos = POS.get(b, "adj")
    ban = set().union({a}, *[s for s in OPP_SETS if a in s or b in s])
    near = [r[1] for r in OPPOSITES if POS.get(r[1], "adj") == pos]
    # one distractor related to the cue itself would be ambiguous, so they come from other sets
    add("opposites", "opposite/" + a, f"The opposite of {a} is", b, EXTRA[pos], ban=ban, near=near, n_near=3)

# ---------------------------------------------------------------- people's work, sciences, body
JOBS = table("""
repairs water pipes=plumber; cuts hair=barber; treats sick animals=veterinarian; makes clothes to measure=tailor
sells flowers=florist; makes things from wood=carpenter; works with hot iron=blacksmith; prepares medicines=pharmacist
makes and repairs shoes=cobbler; makes barrels=cooper; makes maps=cartographer; makes candles=chandler
stuffs dead animals for display=taxidermist; collects stamps=philatelist; carves stone=sculptor""")
for j, p in JOBS:
    add("jobs", "job/" + p, f"A person who {j} is called a", p, [r[1] for r in JOBS])
SCIENCES = table("""
plants=botany; animals=zoology; reptiles and amphibians=herpetology; fish=ichthyology; caves=speleology; maps=cartography
flags=vexillology; insects=entomology; weather=meteorology; earthquakes=seismology; birds=ornithology
fossils=paleontology; cancer=oncology
the origin of words=etymology; the skin=dermatology; blood=hematology; fungi=mycology; human societies=sociology""")
SCI_BAN = {"reptiles and amphibians": ["zoology"], "fish": ["zoology"], "insects": ["zoology"], "birds": ["zoology"],
           "fungi": ["botany"], "fossils": ["zoology"], "animals": ["entomology", "ornithology", "herpetology", "ichthyology"]}
for s, n in SCIENCES:
    add("sciences", "science/" + n, f"The scientific study of {s} is called", n, [r[1] for r in SCIENCES], ban=SCI_BAN.get(s, ()))
BODY = table("""
The organ that pumps blood through the body is the=heart; The organ that controls the rest of the body is the=brain
The organs used for breathing are the=lungs; The organs that filter the blood to make urine are the=kidneys
The organ with which people see is the=eye; The largest internal organ of the human body is the=liver
The organ that makes insulin is the=pancreas; The organ that digests food with strong acid is the=stomach""")
for ctx, o in BODY:
    sing = not ctx.startswith("The organs")
    pool = [r[1] for r in BODY if (not r[0].startswith("The organs")) == sing] if sing else words("lungs, kidneys, eyes, ears, bones, muscles")
    add("body", "body/" + o, ctx, o, pool)

# ---------------------------------------------------------------- places
LANDMARKS = table("""
Eiffel Tower=Paris; Colosseum=Rome; Statue of Liberty=New York; Brandenburg Gate=Berlin; Parthenon=Athens
Golden Gate Bridge=San Francisco; Sydney Opera House=; Big Ben clock tower=London; Kremlin=Moscow; Forbidden City=Beijing
Hagia Sophia=Istanbul; Sagrada Familia=Barcelona; Burj Khalifa=Dubai; Christ the Redeemer statue=Rio de Janeiro
Prado Museum=Madrid; Louvre Museum=Paris; Empire State Building=New York; White House=Washington, D.C.
Little Mermaid statue=Copenhagen; Alhambra palace=Granada; Charles Bridge=Prague; Uffizi Gallery=Florence""")
LANDMARKS = [r for r in LANDMARKS if r[1]]
for mark, c in LANDMARKS:
    add("landmarks", "landmark/" + mark, f"The {mark} is located in the city of", c, [r[1] for r in LANDMARKS],
        ban=["Washington, D.C."] if c == "New York" else ())
GEO = table("""
The highest mountain in the world is=Mount Everest=Kilimanjaro,Mont Blanc,Denali
The highest mountain in Africa is=Kilimanjaro=Mount Everest,Mont Blanc,Denali
The largest ocean on Earth is the=Pacific Ocean=Atlantic Ocean,Indian Ocean,Arctic Ocean
The smallest ocean on Earth is the=Arctic Ocean=Pacific Ocean,Atlantic Ocean,Indian Ocean
The largest hot desert in the world is the=Sahara=Gobi,Kalahari,Mojave
The longest river in South America is the=Amazon=Nile,Danube,Mississippi
The river that flows through London is the=Thames=Seine,Danube,Rhine
The river that flows through Paris is the=Seine=Thames,Danube,Tiber
The river that flows through Cairo is the=Nile=Congo,Niger,Euphrates
The river that flows through Vienna is the=Danube=Seine,Elbe,Loire
The largest country in the world by area is=Russia=China,Brazil,India
The smallest country in the world by area is=Vatican City=Luxembourg,Belgium,Switzerland
The largest island in the world is=Greenland=Madagascar,Iceland,Cuba
The sea between Europe and Africa is the=Mediterranean Sea=Baltic Sea,Caribbean Sea,North Sea
The canal that joins the Mediterranean Sea and the Red Sea is the=Suez Canal=Panama Canal,Kiel Canal,Erie Canal
The canal that joins the Atlantic and the Pacific is the=Panama Canal=Suez Canal,Kiel Canal,Erie Canal""")
for ctx, a, d in GEO:
    add("geography", "geo/" + a, ctx, a, words(d))

# ---------------------------------------------------------------- astronomy
PLANETS = words("Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune")
ASTRO = table("""
The planet closest to the Sun is=Mercury; The largest planet in the Solar System is=Jupiter
The planet known as the Red Planet is=Mars; The planet farthest from the Sun is=Neptune
The hottest planet in the Solar System is=Venus; The planet on which people live is=Earth
The third planet from the Sun is=Earth; The smallest planet in the Solar System is=Mercury
The second planet from the Sun is=Venus; The fourth planet from the Sun is=Mars; The fifth planet from the Sun is=Jupiter
The moon Titan orbits the planet=Saturn; The moons Phobos and Deimos orbit the planet=Mars
The moon Europa orbits the planet=Jupiter; The planet that spins tilted on its side is=Uranus
The Great Red Spot is a storm on the planet=Jupiter""")
for ctx, a in ASTRO:
    add("astronomy", "astro/" + ctx, ctx, a, PLANETS)

# ---------------------------------------------------------------- mythology
GREEK = table("""
the sea=Poseidon; the underworld=Hades; war=Ares; thunder and the sky=Zeus; love and beauty=Aphrodite; wisdom=Athena
the hunt=Artemis; wine=Dionysus; the harvest=Demeter""")
for d, g in GREEK:
    kind = "goddess" if g in ("Aphrodite", "Athena", "Artemis", "Demeter") else "god"
    women = ["Aphrodite", "Athena", "Artemis", "Demeter", "Hera"]
    add("mythology", "greek/" + g, f"In Greek mythology, the {kind} of {d} is", g,
        women if kind == "goddess" else ["Poseidon", "Hades", "Ares", "Zeus", "Dionysus", "Hermes"])
ROMAN = table("war=Mars; the sea=Neptune; love=Venus; wine=Bacchus; fire and the forge=Vulcan")
for d, g in ROMAN:
    add("mythology", "roman/" + g, f"In Roman mythology, the {'goddess' if g == 'Venus' else 'god'} of {d} is", g,
        [r[1] for r in ROMAN] + ["Jupiter", "Pluto", "Mercury"])

# ---------------------------------------------------------------- history
YEARS = table("""
World War II ended in the year=1945=1943,1946,1948
World War I began in the year=1914=1912,1916,1918
The United States declared its independence in the year=1776=1774,1783,1787
The French Revolution began in the year=1789=1787,1792,1799
Christopher Columbus first reached the Americas in the year=1492=1488,1497,1502
The Berlin Wall fell in the year=1989=1987,1991,1993
The first humans landed on the Moon in the year=1969=1967,1971,1972
The Norman conquest of England began in the year=1066=1060,1076,1086
The Titanic sank in the year=1912=1910,1914,1915
The Magna Carta was first sealed in the year=1215=1205,1225,1251
The October Revolution in Russia took place in the year=1917=1915,1919,1921
The American Civil War ended in the year=1865=1863,1867,1871
The Battle of Waterloo was fought in the year=1815=1809,1812,1818
The Great Fire of London broke out in the year=1666=1660,1676,1696
The Soviet Union was dissolved in the year=1991=1988,1993,1995
The Chernobyl nuclear accident happened in the year=1986=1982,1988,1990""")
for ctx, a, d in YEARS:
    add("years", "year/" + ctx, ctx, a, words(d))
PEOPLE = table("""
The first president of the United States was=George Washington
The president of the United States during the American Civil War was=Abraham Lincoln
The first person to walk on the Moon was=Neil Armstrong; The first person to travel into space was=Yuri Gagarin
The leader of India's nonviolent struggle for independence was=Mahatma Gandhi
The first Black president of South Africa was=Nelson Mandela
The French emperor defeated at Waterloo was=Napoleon Bonaparte
The British prime minister for most of World War II was=Winston Churchill
The leader of the Bolsheviks in the Russian Revolution was=Vladimir Lenin
The American minister who gave the "I Have a Dream" speech was=Martin Luther King Jr.
The Greek philosopher who was the teacher of Plato was=Socrates
The Greek philosopher who taught Alexander the Great was=Aristotle
The Italian traveler who described the court of Kublai Khan was=Marco Polo
The nurse known as the Lady with the Lamp was=Florence Nightingale""")
for ctx, a in PEOPLE:
    add("people", "person/" + a, ctx, a, [r[1] for r in PEOPLE])


# slices that a small model answers almost without a miss, and the one it only guesses at, are cut
KEEP = {"capitals": 46, "continents": 12, "languages": 12, "opposites": 18, "element_symbols": 22,
        "atomic_numbers": 12, "landmarks": 16, "discoverers": 30}


def build():
    rows, seen = [], set()
    by_slice = {}
    for it in ITEMS:
        by_slice.setdefault(it["slice"], []).append(it)
    for slice_, n in KEEP.items():
        keep = set(rank([it["context"] for it in by_slice[slice_]], "keep", slice_)[:n])
        by_slice[slice_] = [it for it in by_slice[slice_] if it["context"] in keep]
    turn = 0    # goes round the four positions through the whole file, so each gets a quarter
    for slice_, items in by_slice.items():
        order = rank([it["context"] for it in items], "order", slice_)
        pos_of = {}
        for ctx in order:
            pos_of[ctx] = turn % 4
            turn += 1
        for i, it in enumerate(items):
            assert it["context"] not in seen, it
            seen.add(it["context"])
            pos = pos_of[it["context"]]
            d = rank(it["distractors"], "place", it["context"])
            choices = [*d[:pos], it["answer_text"], *d[pos:]]
            assert len({c.lower() for c in choices}) == 4, it
            assert it["context"] == it["context"].strip() and all(c == c.strip() and c for c in choices), it
            rows.append({"id": f"facts-{slice_}-{i:03d}", "slice": slice_, "cluster": it["cluster"],
                         "context": it["context"], "choices": [" " + c for c in choices], "answer": pos})
    assert len({r["id"] for r in rows}) == len(rows)
    return rows


def main():
    rows = build()
    with OUT.open("w", encoding="utf-8", newline="\n") as f:
        for r in rows:
            f.write(json.dumps(r, ensure_ascii=False) + "\n")
    print(f"{OUT}: {len(rows)} rows, {len({r['cluster'] for r in rows})} clusters", file=sys.stderr)


if __name__ == "__main__":
    main()
