"""In-context retrieval -> evalsets/tasks/retrieval.jsonl (multiple choice).

A passage is filler prose drawn from the hand-written stock below, with four
facts of one family planted in it for four invented people: three at the depths
that are asked about (0.1, 0.5, 0.9) and one more at 0.3 or 0.7. Each passage
gives three rows, one for each asked depth; the four values are the choices in
all three. So rows of one passage differ only in the question (and share a
cluster), and a bias towards some value cannot help in all of them.

Deterministic, standard library only.
Run from the parent of evalsets: python evalsets/generators/retrieval.py
"""

import json
import random
from pathlib import Path

SEED = 7301
OUT = Path(__file__).resolve().parent.parent / "tasks" / "retrieval.jsonl"

# size -> (passages, words of filler). One word is about 1.3 tokens.
SIZES = {"short": (26, 52), "medium": (15, 270), "long": (9, 740)}
# Families by size, in turn. The values of coat, bag, job, fruit, dog and emblem are
# one token each in common vocabularies, so a harness that groups one-token choices
# scores all four in one pass; the longer passages use mostly those.
TURNS = {
    "short": ["locker", "coat", "room", "bag", "town", "job", "train", "dog", "password", "fruit", "emblem"],
    "medium": ["coat", "locker", "bag", "job", "town", "fruit", "dog", "train", "emblem", "coat",
               "password", "bag", "job", "room", "dog"],
    "long": ["coat", "bag", "job", "fruit", "dog", "emblem"],
}
DEPTHS = (0.1, 0.5, 0.9)

STOCK = [
    "The market opened a little later than usual because of the rain.",
    "Two benches by the canal had been repaired over the weekend.",
    "A cart full of cabbages blocked the lane for nearly an hour.",
    "Nobody could say who had left the gate unlocked.",
    "The old clock above the town hall still ran seven minutes slow.",
    "Children were chasing a paper kite along the wall.",
    "From the bakery came the smell of warm bread and cinnamon.",
    "The last ferry of the season carried only a handful of passengers.",
    "A thin layer of dust covered every shelf in the reading room.",
    "Somebody had stacked the chairs in a corner and forgotten about them.",
    "The road climbs slowly through the orchards before it reaches the ridge.",
    "Letters were sorted by hand on a long table near the window.",
    "It took three people to move the wardrobe down the narrow stairs.",
    "The committee met in the back room and argued about the budget.",
    "Half of the seats in the theatre were still empty at eight.",
    "Swallows had built their nests under the roof of the station.",
    "The new bridge was wider than the old one but far less pretty.",
    "Every autumn the school collects chestnuts for the deer in the park.",
    "A notice on the door asked visitors to wipe their shoes.",
    "The soup of the day was leek and potato, as it had been all week.",
    "Most of the fields had already been ploughed when the frost came.",
    "The radio in the workshop played the same song twice before noon.",
    "Along the river the willows leaned so low that they touched the water.",
    "One of the lamps in the corridor flickered and then went out.",
    "The museum keeps its oldest maps in drawers lined with felt.",
    "A group of tourists stopped to photograph the fountain.",
    "The tailor worked late that week to finish the costumes.",
    "There was a queue outside the bank even before it opened.",
    "The path behind the mill is steep and slippery after a storm.",
    "Fresh gravel had been spread over the car park.",
    "The choir practised in the cold chapel with their coats on.",
    "Several crates of apples were waiting to be loaded.",
    "The doctor's waiting room had new curtains and very old magazines.",
    "An argument about parking went on for most of the morning.",
    "The stream dries up in July and returns with the first storms.",
    "Painters had covered the floor with sheets of newspaper.",
    "The hotel was full, so the late arrivals slept in the annex.",
    "A heron stood without moving at the edge of the pond.",
    "The inspector wrote everything down in tiny, careful letters.",
    "It was quiet enough to hear the ice creak on the lake.",
    "The carpenter measured the doorway twice and shook his head.",
    "Ivy had grown over the sign, so few people noticed the shop.",
    "A delivery of flour arrived before sunrise.",
    "The tram was crowded, and the windows were fogged up.",
    "On clear days the islands can be seen from the top of the hill.",
    "The village has two bakers, and they have not spoken for years.",
    "Rain drummed on the tin roof of the shed.",
    "The gardener planted beans along the fence and onions by the path.",
    "Tickets for the concert had sold out within an hour.",
    "A strip of carpet had come loose on the second landing.",
    "The fishermen mended their nets while they waited for the tide.",
    "Some of the older houses still have thick stone walls.",
    "The newspaper printed a short apology on its back page.",
    "No one answered the telephone in the office that afternoon.",
    "The wind had knocked over two of the market stalls.",
    "A stray cat slept on the warm bonnet of the van.",
    "The shopkeeper wrapped each cup in a sheet of soft paper.",
    "They planned to widen the pavement in front of the pharmacy.",
    "The lift was out of order again, so everyone took the stairs.",
    "At the edge of the forest stood a hut with a broken chimney.",
    "The students carried their drawings home in cardboard tubes.",
    "A faint hum came from the machines in the basement.",
    "The mayor gave a short speech, and the band played afterwards.",
    "Many of the tiles in the courtyard were cracked.",
    "The harvest was good that year, though the plums came late.",
    "An enormous map of the coast hung behind the counter.",
    "The night train was delayed by snow on the line.",
    "Some visitors preferred the quiet rooms at the back of the house.",
    "The potter set out her bowls to dry in the sun.",
    "A row of poplars marks the border between the two farms.",
    "The cellar smelled of damp wood and cider.",
    "Volunteers cleaned the beach on the first Sunday of the month.",
    "The staircase was so narrow that people had to pass sideways.",
    "Steam rose from the pots in the kitchen of the canteen.",
    "The librarian mended torn pages with rice paper and glue.",
    "A long crack ran across the ceiling of the hall.",
    "The goats wandered back to the farm on their own.",
    "There had been talk of a new swimming pool for ten years.",
    "The ice rink closes in March, when the sun grows too strong.",
    "A boy with a loud voice sold programmes at the entrance.",
    "The archive is kept at a steady temperature all year round.",
    "Bicycles leaned against every tree in the square.",
    "The postman stopped for a cup of tea at the corner house.",
    "Smoke from the chimneys hung low over the valley.",
    "The actors rehearsed the final scene again and again.",
    "A small plaque explained the history of the well.",
    "The wheat was so tall that the path could hardly be seen.",
    "Nets of onions hung from the beams of the barn.",
    "The engineer drew a quick sketch on the back of a receipt.",
    "By evening the puddles in the yard had turned to ice.",
    "The florist threw away the roses that had not been sold.",
    "A flock of geese crossed the sky above the reservoir.",
    "The windows of the factory had been dark since spring.",
    "It was the kind of afternoon when nothing much happens.",
    "The waiter brought more bread before anyone had asked.",
    "Two lorries met on the bridge, and neither would reverse.",
    "The view from the tower was worth the climb.",
    "A pile of wet leaves had blocked the drain.",
    "The violin maker let the wood rest for several years.",
    "Hikers often lose their way where the trail splits near the quarry.",
    "The hall was decorated with paper lanterns and branches of pine.",
    "A sudden gust blew the hats off three gentlemen.",
    "The bus driver knew most of the passengers by sight.",
    "Heavy curtains kept the afternoon light out of the studio.",
    "The beekeeper wore no gloves and never seemed to be stung.",
    "Somewhere down the street a piano was being tuned.",
    "The ground was too hard for digging after so many dry weeks.",
    "A tall fence had been put up around the building site.",
    "The cook tasted the sauce and reached for the pepper.",
    "Mist covered the meadow until the middle of the morning.",
    "The guest book was full of polite remarks and blots of ink.",
    "An old rowing boat was slowly rotting beside the jetty.",
    "The shop on the corner sells rope, candles and little else.",
    "The teacher opened the windows to let in some air.",
    "Every house on the hill has a balcony that faces south.",
    "The sheep stood close together in the shade of the hedge.",
    "A tap dripped all night in the room next door.",
    "The council promised to mend the road before the winter.",
    "Crowds gathered on the quay to watch the ships leave.",
    "The cobbler kept his nails in jars that had once held jam.",
    "There was a long silence after the last note of the organ.",
    "A fallen branch lay across the tennis court.",
    "The tea was too hot to drink and too weak to enjoy.",
    "The owner of the inn counted the spoons each evening.",
    "Thunder rolled somewhere beyond the hills, but no rain came.",
    "The stable had been turned into a gallery for local artists.",
    "A wheel had come off the handcart in the middle of the street.",
    "The swimming lessons were moved to a different afternoon.",
    "Barrels of salted herring stood in rows along the harbour.",
    "The judge asked for a glass of water before she went on.",
    "Lanterns were hung along the jetty for the summer festival.",
    "The attic was full of trunks that nobody had opened for years.",
    "A hedgehog crossed the lawn without any hurry.",
    "The printer ran out of paper just before the deadline.",
    "Snow slid from the roof with a heavy thud.",
    "The barber swept the floor and turned the sign in the door.",
    "A narrow canal runs behind the houses and down to the docks.",
    "Someone had drawn a sun on the dusty window of the bus.",
    "The jury could not agree, and the hearing was put off.",
    "The best mushrooms grow on the shady side of the slope.",
    "The roof of the pavilion leaked in at least four places.",
    "The grocer weighed the nuts on a pair of brass scales.",
    "A cheerful crowd was waiting for the results to be read out.",
    "The puppet theatre comes to the square every second summer.",
    "The lighthouse has been empty since its keeper retired.",
    "A basket of clean laundry stood at the foot of the stairs.",
    "The wood was stacked neatly under the kitchen window.",
    "The translation took longer than the publisher had hoped.",
    "Moss had crept over the stones on the north side of the church.",
    "The athletes warmed up on the grass beside the track.",
    "Early in the morning the streets belong to the pigeons.",
    "A chain across the drive kept the cars away.",
    "The glazier promised to come back with a larger pane.",
    "The porridge had burned, and everyone ate it anyway.",
    "The ticket machine refused every coin that was put into it.",
    "A broad avenue of lime trees leads up to the castle.",
    "The tide was so low that people could walk out to the wreck.",
    "The apprentices were allowed to leave early before the holiday.",
    "The hinges of the garden gate squeaked whenever it moved.",
    "Only the top floor of the building was still lit.",
    "Flags had been put up along the main street for the visit.",
    "The caretaker shovelled a path from the door to the road.",
    "A cloud of starlings turned above the roofs at dusk.",
    "The surveyor packed up his tripod when the light began to fade.",
]

FIRST = [
    "Mira", "Joren", "Talia", "Osric", "Velda", "Pascal", "Ines", "Corwin", "Lotte", "Bram",
    "Sanna", "Edric", "Nadia", "Hugo", "Farah", "Kester", "Ottilie", "Rafe", "Yusra", "Dorian",
    "Elka", "Matteo", "Greta", "Silas", "Anouk", "Tomas", "Wilma", "Idris", "Petra", "Lennart",
]
LAST = [
    "Holt", "Varga", "Pell", "Quist", "Marrow", "Denby", "Salter", "Brandt", "Okafor", "Finch",
    "Tully", "Reyes", "Norwood", "Kovac", "Ashby", "Lindt", "Carver", "Moreau", "Stroud", "Hale",
    "Ibsen", "Parrish", "Webb", "Castell", "Dunmore", "Yates", "Thorne", "Bexley", "Rask", "Osgood",
]

# family -> (planted sentence, question, values). The stem of the answer repeats the
# planted sentence up to its value.
# Values are disjoint from the words of the stock (checked below).
FAMILIES = {
    "locker": (
        "The locker code of {name} is {value}.",
        "What is the locker code of {name}?",
        "digits4",
    ),
    "room": (
        "{name} works in room {value}.",
        "In which room does {name} work?",
        "digits3",
    ),
    "town": (
        "{name} was born in {value}.",
        "Where was {name} born?",
        ["Tarnwick", "Osselby", "Marlune", "Dovrend", "Kelspar", "Brinmoor", "Yelverne",
         "Sandrath", "Corvale", "Plessig", "Uthmere", "Fennick"],
    ),
    "coat": (
        "{name} came in a {value} coat.",
        "What colour was the coat of {name}?",
        ["red", "blue", "green", "yellow", "purple", "orange", "pink", "white", "black", "grey"],
    ),
    "bag": (
        "In the bag of {name} there was a {value}.",
        "What was in the bag of {name}?",
        ["torch", "camera", "hammer", "trumpet", "kettle", "mirror", "pillow", "whistle", "blanket", "needle"],
    ),
    "train": (
        "The bus of {name} leaves at {value}.",
        "When does the bus of {name} leave?",
        "time",
    ),
    "dog": (
        "{name} has a dog called {value}.",
        "What is the dog of {name} called?",
        ["Comet", "Bella", "Rocky", "Duke", "Ruby", "Rex", "Daisy", "Molly", "Ginger", "Shadow"],
    ),
    "job": (
        "{name} trained as a {value}.",
        "What did {name} train as?",
        ["pilot", "nurse", "lawyer", "chemist", "dancer", "dentist", "butcher", "sailor", "miner", "priest"],
    ),
    "password": (
        "The password chosen by {name} is {value}.",
        "Which password did {name} choose?",
        ["zorbin", "quenta", "mulvax", "trelph", "ganoli", "pexwood", "sindra", "hobrik", "yarlow", "fenupi"],
    ),
    "fruit": (
        "{name} ordered a crate of {value}.",
        "What did {name} order a crate of?",
        ["lemons", "olives", "cherries", "grapes", "peaches", "oranges", "pears", "bananas", "figs", "carrots"],
    ),
    "emblem": (
        "The club of {name} has a {value} on its flag.",
        "What is on the flag of the club of {name}?",
        ["wolf", "fox", "bear", "lion", "horse", "whale", "snake", "frog", "tiger", "rabbit"],
    ),
}


def values_for(rng, spec):
    if spec == "digits4":
        return [str(v) for v in rng.sample(range(1001, 9999), 4)]
    if spec == "digits3":
        return [str(v) for v in rng.sample(range(101, 999), 4)]
    if spec == "time":
        hours = rng.sample(range(6, 23), 4)
        return [f"{h}:{rng.randrange(1, 60):02d}" for h in hours]
    return rng.sample(spec, 4)


def words(text):
    return len(text.split())


def filler(rng, budget):
    """Sentences from the stock, no repeats, as close to the budget as they come."""
    order = STOCK[:]
    rng.shuffle(order)
    out, total = [], 0
    for sentence in order:
        n = words(sentence)
        if total + n > budget + 4:
            continue
        out.append(sentence)
        total += n
        if total >= budget - 2:
            break
    return out


def place(sentences, facts):
    """Insert each (depth, fact), in depth order, where its middle is nearest to depth."""
    total = sum(map(words, sentences)) + sum(words(f) for _, f in facts)
    result, pos, queue = [], 0, sorted(facts)
    for sentence in [*sentences, None]:
        while queue:
            depth, fact = queue[0]
            here = abs(pos + words(fact) / 2 - depth * total)
            step = words(sentence) if sentence else 0
            later = abs(pos + step + words(fact) / 2 - depth * total)
            if sentence is not None and later < here:
                break
            result.append(fact)
            pos += words(fact)
            queue.pop(0)
        if sentence is not None:
            result.append(sentence)
            pos += words(sentence)
    return result


def check_stock():
    assert len(STOCK) == len(set(STOCK)) >= 150
    seen = {w.strip(".,'").lower() for s in STOCK for w in s.split()}
    for _, _, spec in FAMILIES.values():
        if isinstance(spec, list):
            clash = {v.lower() for v in spec} & seen
            assert not clash, clash
    assert not seen & {n.lower() for n in FIRST + LAST}


def build():
    check_stock()
    rng = random.Random(SEED)
    rows = []
    for size, (count, budget) in SIZES.items():
        for k in range(count):
            family = TURNS[size][k % len(TURNS[size])]
            plant, question, spec = FAMILIES[family]
            extra = (0.3, 0.7)[k % 2]
            names = [f"{a} {b}" for a, b in zip(rng.sample(FIRST, 4), rng.sample(LAST, 4))]
            values = values_for(rng, spec)
            planted = [
                (depth, plant.format(name=name, value=value))
                for depth, name, value in zip((*DEPTHS, extra), names, values)
            ]
            sentences = place(filler(rng, budget), planted)
            passage = " ".join(sentences)
            choices = values[:]
            rng.shuffle(choices)
            for i, depth in enumerate(DEPTHS):
                stem = plant.split("{value}")[0].strip().format(name=names[i])
                found = passage.index(planted[i][1]) + len(planted[i][1]) / 2
                rows.append(
                    {
                        "id": f"retrieval-{size}-{k + 1:02d}-{depth}",
                        "slice": f"{size}-{depth}",
                        "cluster": f"retrieval-{size}-{k + 1:02d}",
                        "family": family,
                        "depth": round(found / len(passage), 3),
                        "context": f"{passage}\n\nQuestion: {question.format(name=names[i])}\nAnswer: {stem}",
                        "choices": choices,
                        "answer": choices.index(values[i]),
                    }
                )
    return rows


def main():
    rows = build()
    with OUT.open("w", encoding="utf-8", newline="\n") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{OUT.name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
